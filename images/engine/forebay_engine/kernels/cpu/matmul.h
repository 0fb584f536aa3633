/* Products of a few rows with a packed matrix: memory-bound at one row, within reach of the peak at hundreds.
 *
 * A matrix W [outputs, inputs] is packed as [outputs / NB][inputs / STEP][NB][STEP], zeros beyond its edges: one pass
 * reads memory in order, and an output's sum runs over the inputs in order in a lane of its own. So a row's numbers do
 * not depend on how many rows or threads there are. */
#pragma once

#include "vector.h"

/* c [M, NB] (row stride ldc) = a [M, inputs] (row stride lda) times one packed column block b. */
ALWAYS_INLINE void tile(const int M, const elem *a, long lda, const elem *b, long inputs, float *c, long ldc) {
    vf acc[M][NV];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) acc[m][v] = (vf){0};
    for (long k = 0; k < inputs; k += STEP, b += NB * STEP) {
        vf w[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) memcpy(&w[v], b + v * LANES * STEP, sizeof w[v]);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
#if FOREBAY_BF16
            int32_t pair;
            memcpy(&pair, a + m * lda + k, 4);
#if defined(__AVX512BF16__)
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++)
                acc[m][v] = (vf)_mm512_dpbf16_ps((__m512)acc[m][v], (__m512bh)w[v], x);
#else
            vf even = (vf)(((vu){0} + (uint32_t)pair) << 16), odd = (vf)((vu){0} + ((uint32_t)pair & 0xffff0000u));
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) {
                acc[m][v] += (vf)((vu)w[v] << 16) * even;
                acc[m][v] += (vf)((vu)w[v] & 0xffff0000u) * odd;
            }
#endif
#else
            float x = a[m * lda + k];
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) acc[m][v] += w[v] * x;
#endif
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) store(c + m * ldc + v * LANES, acc[m][v]);
}

typedef void tile_function(const elem *a, long lda, const elem *b, long inputs, float *c, long ldc);
#define TILE(M)                                                                                                       \
    static __attribute__((noinline)) void tile##M(const elem *a, long lda, const elem *b, long inputs, float *c,      \
                                                  long ldc) {                                                         \
        tile(M, a, lda, b, inputs, c, ldc);                                                                           \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
static tile_function *const tiles[TILE_ROWS + 1] = {0, tile1, tile2, tile3, tile4, tile5, tile6};

/* Rows are cut into tiles of nearly equal height: 8 as 4 + 4, since a tile costs a pass over the block whatever its height. */
ALWAYS_INLINE long tile_count(long rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
ALWAYS_INLINE long tile_first(long rows, long count, long index) { return rows * index / count; }

typedef struct {
    const elem *packed;
    const float *bias; /* [padded outputs], or NULL */
    long inputs;       /* padded to STEP */
    long blocks;       /* padded outputs / NB */
} matrix;

typedef enum {
    PUT,     /* out = product */
    ADD,     /* out += product */
    SWIGLU,  /* activations = silu(gate) * up, where each block holds NB/2 outputs of gate, then as many of up */
} epilogue;

ALWAYS_INLINE void finish(epilogue kind, const float *c, const float *bias, float *out, elem *activations) {
    vf sum[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) sum[v] = load(c + v * LANES);
    if (bias)
        for (int v = 0; v < NV; v++) sum[v] += load(bias + v * LANES);
    switch (kind) {
    case PUT:
        for (int v = 0; v < NV; v++) store(out + v * LANES, sum[v]);
        break;
    case ADD:
        for (int v = 0; v < NV; v++) store(out + v * LANES, load(out + v * LANES) + sum[v]);
        break;
    case SWIGLU:
        for (int v = 0; v < NV / 2; v++)
            store_elems(activations + v * LANES, sum[v] * sum[v + NV / 2] / (1.0f + exponential(-sum[v])));
        break;
    }
}

/* Share `part` of `parts` of a product. `out` (or `activations`) has row stride `ldo`. */
static void multiply(const matrix *w, const elem *a, long lda, long rows, epilogue kind, float *out, elem *activations,
                     long ldo, long part, long parts) {
    long count = tile_count(rows), total = w->blocks * count;
    for (long at = total * part / parts, end = total * (part + 1) / parts; at < end; at++) {
        long block = at / count, index = at % count;
        long first = tile_first(rows, count, index), height = tile_first(rows, count, index + 1) - first;
        float c[TILE_ROWS * NB] __attribute__((aligned(64)));
        tiles[height](a + first * lda, lda, w->packed + block * NB * w->inputs, w->inputs, c, NB);
        for (long m = 0; m < height; m++) {
            long row = first + m;
            finish(kind, c + m * NB, w->bias ? w->bias + block * NB : 0, out ? out + row * ldo + block * NB : 0,
                   activations ? activations + row * ldo + block * (NB / 2) : 0);
        }
    }
}
