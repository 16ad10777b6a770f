// The product that makes Llama's queries, keys and values, on Hopper in bf16: compiled behind
// swiglu_products.cu, whose forward tiles it takes. rope_product.py launches it.
//   matmul_rope    out (N,OC) = inp (N,C) @ w (OC,C)', and its first columns rotated by RoPE
// A lane has 8 neighbouring columns in fp32, so it rotates four pairs before it rounds and stores
// them: a pass over queries and keys less.

namespace turns::rope_product {

using swiglu_products::LONG, swiglu_products::Sizes, swiglu_products::TileAt,
    swiglu_products::TileResult;

// After so many parts of 32 columns the same columns of another head come, with the same turns.
constexpr int AGAIN = HS % 32 == 0 && HS < 192 ? HS / 32 : 6;

// Of a tile's 192 columns, product column 96 h + 24 n + s is column 96 h + 4 s + n. table (T,HS) has
// the cosines and sines by which rope_forward turns pairs of neighbouring columns.
__device__ void finish_rows(real* out, const float* table, const TileResult& x, unsigned item,
                            const Sizes<false>& sizes, int T, int rotated) {
    TileAt at(forget(item), sizes);
    int lane = forget(threadIdx.x) % 32;
    int row = at.row + first_row_of_warp() + lane / 4, column = at.column + lane % 4 * 8;
#pragma unroll
    for (int eight = 0; eight < 4; eight++) {  // rows 0..7, 8..15, 64..71 and 72..79
        int r = row + eight / 2 * 64 + eight % 2 * 8;
        if (r >= sizes.N) continue;
        const float* turns = table + (size_t)(r % T) * HS;
        real* to = out + (size_t)r * sizes.H;
        Pack<8> next = load<8>(turns + column % HS);
#pragma unroll
        for (int first = 0; first < AGAIN; first++) {
            Pack<8> turn = next;
            next = load<8>(turns + (column + 32 * first + 32) % HS);  // while turn is used
#pragma unroll
            for (int part = first; part < 6; part += AGAIN) {
                int c = column + 32 * part;
                if (at.column + 32 * part >= sizes.H) continue;
                Pack<8> y;
                for (int i = 0; i < 8; i++)
                    y[i] = x.x[0][eight / 2 * LONG / 8 + part / 3 * 12 + i % 4 * 3 + part % 3]
                              [eight % 2 * 2 + i / 4];
                if (c < rotated)
                    for (int i = 0; i < 8; i += 2) {
                        float before = y[i];
                        y[i] = before * turn[i] - y[i + 1] * turn[i + 1];
                        y[i + 1] = before * turn[i + 1] + y[i + 1] * turn[i];
                    }
                store(to + c, y);
            }
        }
    }
}

}  // namespace turns::rope_product

#ifdef __CUDACC__  // Clusters of two blocks. read_kernels does not know this word in a definition
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_rope(
    real*, const __grid_constant__ Tiles, const __grid_constant__ Tiles, const float*, int, int,
    int, int, int);
#endif

// out (N,OC) = inp (N,C) @ w (OC,C)', of which `rotated` columns, whole heads, are rotated: row r
// by table (T,HS)[r % T]. C and OC are multiples of 64, HS of 8. Items: blocks, an even number.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_rope(
    real* __restrict__ out, const __grid_constant__ Tiles inp, const __grid_constant__ Tiles w,
    const float* __restrict__ table, int N, int OC, int C, int T, int rotated) {
    using namespace turns::swiglu_products;
    Sizes<false> sizes = {N, OC, C, LONG, LONG / 2};
    multiply_by_turns(inp, w, inp, inp, sizes, [&](const TileResult& x, int item, auto&&...) {
        turns::rope_product::finish_rows(out, table, x, item, sizes, T, rotated);
    });
}
