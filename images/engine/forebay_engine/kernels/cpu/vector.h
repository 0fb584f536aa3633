/* Vectors of float32 as wide as the target's registers, and the element type of weights, activations and KV.
 *
 * Compiled once with FOREBAY_BF16=1 and once with 0: `elem` is bfloat16 or float32. Sums are always float32. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* A tile of the matrix product is TILE_ROWS x NV vectors of sums: what fits the registers beside NV vectors of weights. */
#if defined(__AVX512F__)
enum { LANES = 16, NV = 4 };
#elif defined(__AVX2__)
enum { LANES = 8, NV = 2 };
#elif defined(__aarch64__)
enum { LANES = 4, NV = 4 };
#else
enum { LANES = 4, NV = 2 };
#endif
enum { NB = NV * LANES, TILE_ROWS = 6 };

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

#if defined(__AVX512F__)
static const vi lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
static const vi lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const vi lane_numbers = {0, 1, 2, 3};
#endif

#if FOREBAY_BF16
typedef uint16_t elem;
enum { STEP = 2 }; /* elements of a row that share 32 bits, as the bfloat16 dot product takes them */
#else
typedef float elem;
enum { STEP = 1 };
#endif

ALWAYS_INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

ALWAYS_INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }

ALWAYS_INLINE vf splat(float x) { return x - (vf){0}; }

ALWAYS_INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* Pairwise, so that the chain of dependent operations is short: half of the lanes at a time meet the other half. */
#define REDUCE(v, operation)                                                                                          \
    _Pragma("GCC unroll 4") for (int distance = LANES / 2; distance; distance /= 2) {                                                         \
        vf other = __builtin_shuffle(v, lane_numbers ^ distance);                                                     \
        v = operation;                                                                                                \
    }

ALWAYS_INLINE float sum_lanes(vf v) {
    REDUCE(v, v + other)
    return v[0];
}

ALWAYS_INLINE float max_lanes(vf v) {
    REDUCE(v, pick(v > other, v, other))
    return v[0];
}

/* e^x within 2 units in the last place; exactly 1 at 0 and exactly 0 below -87.3, -inf included. */
ALWAYS_INLINE vf exponential(vf x) {
    const vf low = splat(-87.3f), high = splat(88.0f), magic = splat(12582912.0f); /* 1.5 * 2^23: rounds to integers */
    vi zero = x < low;
    x = pick(x > high, high, pick(zero, low, x));
    vf n = (x * 1.44269504f + magic) - magic;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    vf scale = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
    return pick(zero, (vf){0}, p * scale);
}

#if FOREBAY_BF16
ALWAYS_INLINE elem narrow(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if (x != x) return 0x7fc0;
    return (elem)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

/* Round to nearest, ties to even; a NaN stays one. */
ALWAYS_INLINE void store_elems(elem *p, vf v) {
    vu u = (vu)v;
    u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    u = (vu)pick(v != v, (vf)((vu){0} + 0x7fc0), (vf)u);
    vh h = __builtin_convertvector(u, vh);
    memcpy(p, &h, sizeof h);
}

ALWAYS_INLINE vf load_elems(const elem *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
#else
ALWAYS_INLINE elem narrow(float x) { return x; }
ALWAYS_INLINE void store_elems(elem *p, vf v) { store(p, v); }
ALWAYS_INLINE vf load_elems(const elem *p) { return load(p); }
#endif
