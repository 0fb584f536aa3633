/* Causal attention over the paged arena: flash attention (Dao et al. 2022) out of matmul.h's tiles.
 *
 * Keys are taken in tiles of KEYS positions, at multiples of KEYS from the sequence's start. K of a tile is packed as a
 * matrix [KEYS, head_size], V as one [head_size, KEYS]; both meet the tile's queries by the same product as weights do.
 * The order of a query's sums depends on its position only, not on what is computed beside it. */
#pragma once

#include "matmul.h"

enum { KEYS = 64, QUERY_ROWS = 192 };

typedef struct {
    elem *base;
    long block_size, block_stride; /* tokens; elements from one block to the next */
    long head_stride, layer_stride, value_offset;
    long head_size;
} arena;

/* Where a token's K lies; its V lies value_offset further. */
ALWAYS_INLINE elem *slot_of(const arena *kv, const int64_t *table, long position, long layer, long head) {
    return kv->base + table[position / kv->block_size] * kv->block_stride + head * kv->head_stride +
           layer * kv->layer_stride + position % kv->block_size * kv->head_size;
}

typedef struct {
    elem *queries;        /* [QUERY_ROWS, head_size] */
    elem *keys, *values;  /* packed tiles */
    elem *weights;        /* [TILE_ROWS, KEYS] */
    float *scores;        /* [TILE_ROWS, KEYS] */
    float *sums;          /* [QUERY_ROWS, padded head_size] */
    float *part;          /* [TILE_ROWS, NB] */
    float most[QUERY_ROWS], total[QUERY_ROWS], added[TILE_ROWS];
} attention_scratch;

#if defined(__AVX512F__)
/* Sixteen rows of sixteen 32-bit words, transposed. */
ALWAYS_INLINE void transpose16(vi r[16]) {
    const vi low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
    const vi low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const vi low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    const vi low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
#define EXCHANGE(distance, low)                                                                                       \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) if (!(i & distance)) {                                      \
        vi a = r[i], b = r[i + distance];                                                                             \
        r[i] = __builtin_shuffle(a, b, low);                                                                          \
        r[i + distance] = __builtin_shuffle(a, b, low + distance);                                                    \
    }
    EXCHANGE(1, low1)
    EXCHANGE(2, low2)
    EXCHANGE(4, low4)
    EXCHANGE(8, low8)
#undef EXCHANGE
}
#endif

/* The `count` keys at `rows` as packed column blocks [KEYS / NB][head_size / STEP][NB][STEP]. Columns from `count` on
 * hold anything: their scores are masked. */
static void pack_keys(elem *packed, const elem *const rows[KEYS], long count, long head_size) {
    long words = head_size / STEP; /* of 32 bits */
    for (long first = 0; first < count; first += LANES) {
        char *out = (char *)(packed + first / NB * NB * head_size) + first % NB * 4;
        long done = 0;
#if defined(__AVX512F__)
        for (; done + 16 <= words; done += 16) {
            vi r[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                r[i] = (vi){0};
                if (first + i < count) memcpy(&r[i], (const char *)rows[first + i] + done * 4, 64);
            }
            transpose16(r);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) memcpy(out + (done + i) * NB * 4, &r[i], 64);
        }
#endif
        for (; done < words; done++)
            for (long i = 0; i < LANES; i++) {
                int32_t word = 0;
                if (first + i < count) memcpy(&word, (const char *)rows[first + i] + done * 4, 4);
                memcpy(out + done * NB * 4 + i * 4, &word, 4);
            }
    }
}

/* The values beside the `count` keys at `rows`, as packed column blocks [ceil(head_size / NB)][KEYS / STEP][NB][STEP], of
 * which the first ceil(count / STEP) are written. */
static void pack_values(elem *packed, const elem *const rows[KEYS], long count, long offset, long head_size) {
    for (long block = 0; block * NB < head_size; block++, packed += NB * KEYS) {
        long width = head_size - block * NB < NB ? head_size - block * NB : NB;
        for (long k = 0; k < count; k += STEP) {
            elem *out = packed + k * NB;
#if FOREBAY_BF16
            const elem *even = rows[k] + offset + block * NB;
            const elem *odd = k + 1 < count ? rows[k + 1] + offset + block * NB : 0;
            if (width == NB) {
#pragma GCC unroll 8
                for (int v = 0; v < NV; v++) {
                    vu pairs = (vu)load_elems(even + v * LANES) >> 16;
                    if (odd) pairs |= (vu)load_elems(odd + v * LANES);
                    memcpy(out + v * LANES * 2, &pairs, sizeof pairs);
                }
                continue;
            }
            for (long i = 0; i < NB; i++) {
                out[i * 2] = i < width ? even[i] : 0;
                out[i * 2 + 1] = odd && i < width ? odd[i] : 0;
            }
#else
            if (width < NB) memset(out, 0, NB * sizeof(elem));
            memcpy(out, rows[k] + offset + block * NB, width * sizeof(elem));
#endif
        }
    }
}

/* Addresses of K of positions `first` .. `first` + `count` - 1. */
static void find_keys(const arena *kv, const int64_t *table, long layer, long head, long first, long count,
                      const elem *rows[KEYS]) {
    long block = first / kv->block_size, slot = first % kv->block_size;
    for (long i = 0; i < count; block++, slot = 0) {
        const elem *at = kv->base + table[block] * kv->block_stride + head * kv->head_stride +
                         layer * kv->layer_stride + slot * kv->head_size;
        for (; i < count && slot < kv->block_size; slot++, i++, at += kv->head_size) rows[i] = at;
    }
}

/* Queries `first` .. `end` of one sequence for one KV head and the `group` query heads that share it.
 * q: row 0's first query head of the group, float32, [tokens, q_stride]; out likewise, [tokens, out_stride] elements.
 * `start` is row 0's position. */
static void attend(const arena *kv, const int64_t *table, long layer, long head, long group, const float *q,
                   long q_stride, elem *out, long out_stride, long start, long first, long end,
                   attention_scratch *s) {
    long size = kv->head_size, padded = (size + NB - 1) / NB * NB, rows = (end - first) * group;
    for (long row = 0; row < rows; row++) {
        const float *from = q + (first + row / group) * q_stride + row % group * size;
        for (long i = 0; i < size; i++) s->queries[row * size + i] = narrow(from[i]);
        s->most[row] = -INFINITY;
        s->total[row] = 0;
    }
    memset(s->sums, 0, rows * padded * sizeof(float));
    long seen = start + end, count = tile_count(rows);
    for (long key = 0; key < seen; key += KEYS) {
        const elem *at[KEYS];
        long here = seen - key < KEYS ? seen - key : KEYS, summed = (here + STEP - 1) / STEP * STEP;
        find_keys(kv, table, layer, head, key, here, at);
        pack_keys(s->keys, at, here, size);
        pack_values(s->values, at, here, kv->value_offset, size);
        for (long index = 0; index < count; index++) {
            long top = tile_first(rows, count, index), height = tile_first(rows, count, index + 1) - top;
            if (start + first + (top + height - 1) / group < key) continue; /* no row of the tile sees a key of these */
            for (long block = 0; block < KEYS / NB; block++)
                tiles[height](s->queries + top * size, size, s->keys + block * NB * size, size, s->scores + block * NB,
                              KEYS);
            float shrink[TILE_ROWS + LANES] = {0}; /* whole vectors of it are loaded */
            for (long m = 0; m < height; m++) {
                float *score = s->scores + m * KEYS;
                long row = top + m, visible = start + first + row / group - key + 1;
                for (long i = visible > 0 ? visible : 0; i < KEYS; i++) score[i] = -INFINITY;
                vf high = load(score);
                for (int i = LANES; i < KEYS; i += LANES) high = pick(load(score + i) > high, load(score + i), high);
                float most = max_lanes(high), before = s->most[row];
                if (before > most) most = before;
                vf sum = {0};
                for (int i = 0; i < KEYS; i += LANES) {
                    vf weight = exponential(load(score + i) - most);
                    store_elems(s->weights + m * KEYS + i, weight);
                    sum += weight;
                }
                s->added[m] = sum_lanes(sum);
                shrink[m] = before - most;
                s->most[row] = most;
            }
            for (int i = 0; i < TILE_ROWS; i += LANES) store(shrink + i, exponential(load(shrink + i)));
            for (long m = 0; m < height; m++) s->total[top + m] = s->total[top + m] * shrink[m] + s->added[m];
            for (long block = 0; block * NB < size; block++) {
                tiles[height](s->weights, KEYS, s->values + block * NB * KEYS, summed, s->part, NB);
                for (long m = 0; m < height; m++) {
                    float *sums = s->sums + (top + m) * padded + block * NB;
                    for (int v = 0; v < NV; v++)
                        store(sums + v * LANES, load(sums + v * LANES) * shrink[m] + load(s->part + m * NB + v * LANES));
                }
            }
        }
    }
    for (long row = 0; row < rows; row++) {
        elem *to = out + (first + row / group) * out_stride + row % group * size;
        float by = 1.0f / s->total[row];
        for (long i = 0; i < size; i++) to[i] = narrow(s->sums[row * padded + i] * by);
    }
}
