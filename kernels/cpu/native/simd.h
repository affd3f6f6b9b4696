// Vectors of 16 lanes in the compiler's portable extension, and the two dot products for which CPUs have instructions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
struct bf16 { uint16_t bits; };

// work(0), work(1), … with constants, so that what they index stays in registers.
template <int N, class Work> __attribute__((always_inline)) inline void each(const Work& work) {
    if constexpr (N > 0) {
        each<N - 1>(work);
        work(std::integral_constant<int, N - 1>{});
    }
}

// Unaligned.
template <class V> inline V load(const void* p) {
    typedef V Anywhere __attribute__((aligned(1), may_alias));
    return *static_cast<const Anywhere*>(p);
}
template <class V> inline void store(void* p, const V& v) {
    typedef V Anywhere __attribute__((aligned(1), may_alias));
    *static_cast<Anywhere*>(p) = v;
}
inline Floats all(float x) { return Floats{} + x; }
inline Ints all(int32_t x) { return Ints{} + x; }
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { uint32_t bits = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &bits, 4); return f; }

inline Floats load16(const float* p) { return load<Floats>(p); }
inline Floats load16(const bf16* p) { return (Floats)(__builtin_convertvector(load<Halves>(p), Words) << 16); }
inline void store16(float* p, Floats v) { store(p, v); }
inline Halves rounded(Floats v) {  // to bfloat16, to the nearest even; NaN stays NaN
#ifdef __AVX512BF16__
    return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
    Words bits = (Words)v, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(v == v ? up : (bits >> 16) | 0x40, Halves);
#endif
}
inline void store16(bf16* p, Floats v) { store(p, rounded(v)); }
template <class T> inline Floats load_some(const T* p, int n) {  // lanes from n on are 0
    T padded[LANES] = {};
    std::memcpy(padded, p, n * sizeof(T));
    return load16(padded);
}
template <class T> inline void store_some(T* p, Floats v, int n) {
    T padded[LANES];
    store16(padded, v);
    std::memcpy(p, padded, n * sizeof(T));
}
template <class T> inline Floats load_up_to(const T* p, int n) { return n >= LANES ? load16(p) : load_some(p, n); }
template <class T> inline void store_up_to(T* p, Floats v, int n) { n >= LANES ? store16(p, v) : store_some(p, v, n); }

// Lanes of `a`, and from LANES on of `b`.
__attribute__((always_inline)) inline Floats pick(Floats a, Floats b, const Ints& from) {
#ifdef __clang__  // has no builtin for this, but knows the loop
    Floats picked{};
    for (int i = 0; i < LANES; ++i) picked[i] = from[i] < LANES ? a[from[i] % LANES] : b[from[i] % LANES];
    return picked;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

// combine(combine(v[0], v[1]), …), in pairs.
template <class Combine> inline float across(Floats v, const Combine& combine) {
    each<4>([&](auto step) {
        Ints from;
        for (int i = 0; i < LANES; ++i) from[i] = i ^ (1 << step);
        v = combine(v, pick(v, v, from));
    });
    return v[0];
}
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline float largest(Floats v) { return across(v, larger); }
inline float sum(Floats v) { return across(v, [](Floats a, Floats b) { return a + b; }); }

// acc[i] + w[2i] · x[2i] + w[2i + 1] · x[2i + 1] of bfloat16 pairs; `x` is one pair, for all lanes.
inline Floats dot(Floats acc, Words w, uint32_t x) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(x)));
#else
    uint32_t low = x << 16, high = x & 0xffff0000u;
    float first, second;
    std::memcpy(&first, &low, 4);
    std::memcpy(&second, &high, 4);
    return acc + (Floats)(w << 16) * first + (Floats)(w & 0xffff0000u) * second;
#endif
}

// acc[i] + the sum over j < 4 of w[4i + j] (unsigned) · x[j] (signed) of bytes; `x` is one group of four, for all lanes.
inline Ints dot(Ints acc, Bytes w, uint32_t x) {
#ifdef __AVX512VNNI__
    return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(int(x)));
#else
    Words words = (Words)w;
    for (int j = 0; j < 4; ++j) acc += (Ints)((words >> (8 * j)) & 0xff) * int32_t(int8_t(x >> (8 * j)));
    return acc;
#endif
}

// e to the power of x: relative error below 2e-7; 0 below -87; NaN stays NaN.
inline Floats exp(Floats x) {
    Floats whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
    Floats f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * f + c;
    p = p * f * f + f + 1.0f;
    Floats power = (Floats)((__builtin_convertvector(whole, Ints) + 127) << 23);
    Floats result = x < -87.0f ? all(0.0f) : p * power;
    result = x > 88.0f ? all(INFINITY) : result;
    return x == x ? result : x;
}

inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

// `n` values in float32, normed where there is a norm, rounded to T in between as the reference does.
template <class T, class W> void read_row(const T* x, int n, const W* norm, float eps, float* out) {
    Floats squares{};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        Floats v = load16(x + i);
        squares += v * v;
        store16(out + i, v);
    }
    float total = sum(squares);
    for (; i < n; ++i) out[i] = to_float(x[i]), total += out[i] * out[i];
    if (!norm) return;
    const float scale = 1 / std::sqrt(total / n + eps);
    for (i = 0; i < n; i += LANES) {
        T narrow[LANES];
        store16(narrow, load_up_to(out + i, n - i) * scale);
        store16(narrow, load16(narrow) * load_up_to(norm + i, n - i));
        store_up_to(out + i, load16(narrow), n - i);
    }
}
