// Where documents begin and end, and positions in them: see documents.py. Compiled after kernels.cu,
// whose attention then has the three functions of documents.cuh.

namespace documents {

// Whether token t > 0 of a row begins a document: an <|endoftext|> does, unless it ends an answer.
// Then it counts as a target, and the next token does not.
__device__ bool begins(const int* tokens, const int* targets, int t, int eot) {
    return tokens[t] == eot && (targets[t - 1] < 0 || targets[t] >= 0);
}

// bounds (B,2,T) = where the document of each of the tokens (B,T) begins in its row, and where it
// ends. Targets (B,T) that do not count are -1. With eot < 0 a row is one document. A thread walks
// both ways from its token, so the longest document sets the time. Items: B*T tokens.
BLOCK(256, threads)
extern "C" __global__ void find_documents(int* __restrict__ bounds, const int* __restrict__ tokens,
                                          const int* __restrict__ targets, int N, int T, int eot) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef SIGHT
    if (i == 0) document_bounds = bounds;  // for all launches of attention from now on
#endif
    if (i >= N) return;
    int t = i % T, first = t, end = t + 1;
    const int *own_tokens = tokens + i - t, *own_targets = targets + i - t;
    if (eot < 0) first = 0, end = T;
    while (first > 0 && !begins(own_tokens, own_targets, first, eot)) first--;
    while (end < T && !begins(own_tokens, own_targets, end, eot)) end++;
    int* bound = bounds + 2 * (i - t) + t;  // bounds[b][0][t]
    bound[0] = first;
    bound[T] = end;
}

// x (N,C), tokens' embeddings, += wpe (maxT,C) at each token's place in its document. Items: N*C
// numbers.
BLOCK(256, 4 * threads)
extern "C" __global__ void add_positions(float* __restrict__ x, const real* __restrict__ wpe,
                                         const int* __restrict__ bounds, int N, int T, int C) {
    int packs = C / 4, i = blockIdx.x * blockDim.x + threadIdx.x;
    int row = i / packs, c = 4 * (i % packs);
    if (row >= N) return;
    int t = row % T, place = t - bounds[2 * row - t];
    float* at = x + (size_t)row * C + c;
    store(at, load<4>(at) + load<4>(wpe + (size_t)place * C + c));
}

// dwpe (maxT,C)[place] = the sum of the rows of dout (B,T,C) at this place of a document, in order;
// += with adds. Items: maxT*C numbers.
BLOCK(256, W * threads)
extern "C" __global__ void add_position_gradients(
    float* __restrict__ dwpe, const real* __restrict__ dout, const int* __restrict__ bounds, int B,
    int T, int maxT, int C, int adds) {
    size_t i = first_number();
    if (i >= (size_t)maxT * C) return;
    int place = row_of_number(i, C);
    Pack<W> sum = {};
    if (adds) sum = load<W>(dwpe + i);
    for (int b = 0; b < B; b++) {
        const int* ends = bounds + (size_t)(2 * b + 1) * T;
        for (int t = 0; t < T; t = ends[t])
            if (t + place < ends[t]) sum = sum + load<W>(dout + ((size_t)b * T + t) * C + i);
    }
    store(dwpe + i, sum);
}

}  // namespace documents
