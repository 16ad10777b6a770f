// What a query sees with --document-mask, in place of kernels.cu's three functions: the keys of its
// own document, up to its own key. Documents follow one another, so tiles of keys before that of a
// block's first query are skipped, and tiles of queries behind that of a block's last key.

// (B,2,T): for each token the first of its document, and the first behind it: see find_documents.
#ifdef __CUDACC__
__device__
#endif
const int* document_bounds;

template <bool behind>
__device__ int document_bound(const Own& own, int row) {
    int T = own.out.T;  // the last rows of a block may be beyond it
    return __ldg(document_bounds + (size_t)(2 * own.out.b + behind) * T + min(row, T - 1));
}

__device__ int first_key(const Own& own) { return document_bound<false>(own, own.first); }
__device__ int end_of_queries(const Own& own) {
    return document_bound<true>(own, own.first + B_r - 1);
}

// x = value where a query does not see a key. Column 0 of x is token `column`. In place of LOWEST
// stands a power of two: a query may see no key of its first tiles, whose weights are then 2^0, for
// which scale2 * x must be exact, and go when it sees one. The first row of a slab is that whose
// document ends first, and its last row that whose document begins last.
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
