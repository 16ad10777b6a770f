// What a query sees with --document-mask, in place of kernels.cu's three functions: the keys of its
// own document, up to its own key. Documents follow one another, so a block of queries begins with the
// document of its first query, and a block of keys ends with the document of its last key.

// (B,2,T): where each token's document begins, and where it ends: see find_documents.
#ifdef __CUDACC__
__device__
#endif
const int* document_bounds;

template <bool end>
__device__ int document_bound(const Own& own, int row) {
    int T = own.out.T;  // the last rows of a block may be beyond it
    return __ldg(document_bounds + (size_t)(2 * own.out.b + end) * T + min(row, T - 1));
}

__device__ int first_key(const Own& own) { return document_bound<false>(own, own.first); }
__device__ int end_of_queries(const Own& own) {
    return document_bound<true>(own, own.first + B_r - 1);
}

// x = value where a query does not see a key. Column 0 of x is token `column`. If a query sees no
// key of its first tiles, its maximum is value and its weights there are 2^0; the first key that it
// sees scales them by 0. For that scale2 * value must be exact: a power of two in place of LOWEST.
// In a slab, the first row's document ends first, and the last row's begins last.
template <bool rows_are_keys, int columns>
__device__ void hide_future(Result<columns>& x, float value, const Own& own, int column) {
    int last = own.slab_first + SLAB - 1, end = column + columns;
    bool diagonal = column <= last && end > own.slab_first;
    bool edge = rows_are_keys ? end > document_bound<true>(own, own.slab_first)
                              : column < document_bound<false>(own, last);
    if (!diagonal && !edge) return;
    if (value == LOWEST) value = -0x1p126f;
    each<columns>([&](Element e) {
        int r = own.warp_first + e.row(), c = column + e.column();
        int bound = document_bound<rows_are_keys>(own, r);
        if (rows_are_keys ? c < r || c >= bound : c > r || c < bound) x[e] = value;
    });
}
