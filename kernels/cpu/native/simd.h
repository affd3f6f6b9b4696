// Floats and bfloat16 in vectors of the compiler's portable extension.
#pragma once

#include <cmath>

#include "isa.h"

struct bf16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };  // without infinities: the largest magnitude is NaN

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
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { uint32_t bits = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &bits, 4); return f; }

inline Floats load_lanes(const float* p) { return load<Floats>(p); }
inline Floats load_lanes(const bf16* p) { return (Floats)(widened(load<Halves>(p)) << 16); }
inline Floats load_lanes(const e4m3* p) {
    const Words v = widened(load<Quarters>(p)), size = v & 0x7f;
    const Words small = (Words)(__builtin_convertvector((Ints)size, Floats) * 0x1p-9f);  // subnormal: multiples of 2^-9
    const Words found = size < 8 ? small : size == 0x7f ? all(0x7fc00000u) : (size << 20) + (120u << 23);
    return (Floats)(found | (v & 0x80) << 24);
}
inline void store_lanes(float* p, Floats v) { store(p, v); }
inline Halves rounded(Floats v) {  // to bfloat16, to the nearest even; NaN stays NaN
#if defined(QUIRE_AVX512) && defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
    Words bits = (Words)v, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return low_halves(v == v ? up : (bits >> 16) | 0x40);
#endif
}
inline void store_lanes(bf16* p, Floats v) { store(p, rounded(v)); }
inline Floats to_bf16_and_back(Floats v) { return (Floats)(widened(rounded(v)) << 16); }
template <class T> inline Floats load_some(const T* p, int n) {  // lanes from n on are 0
    T padded[LANES] = {};
    std::memcpy(padded, p, n * sizeof(T));
    return load_lanes(padded);
}
template <class T> inline void store_some(T* p, Floats v, int n) {
    T padded[LANES];
    store_lanes(padded, v);
    std::memcpy(p, padded, n * sizeof(T));
}
template <class T> inline Floats load_up_to(const T* p, int n) { return n >= LANES ? load_lanes(p) : load_some(p, n); }
template <class T> inline void store_up_to(T* p, Floats v, int n) {
    n >= LANES ? store_lanes(p, v) : store_some(p, v, n);
}

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

constexpr int log2(int n) { return n < 2 ? 0 : 1 + log2(n / 2); }

// combine(combine(v[0], v[1]), …), in pairs.
template <class Combine> inline float across(Floats v, const Combine& combine) {
    each<log2(LANES)>([&](auto step) {
        Ints from;
        for (int i = 0; i < LANES; ++i) from[i] = i ^ (1 << step);
        v = combine(v, pick(v, v, from));
    });
    return v[0];
}
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline float largest(Floats v) { return across(v, larger); }
inline float sum(Floats v) { return across(v, [](Floats a, Floats b) { return a + b; }); }

// The sum of each of LANES vectors, in the order of `sum`: halves of two vectors are added at once. Changes them.
__attribute__((always_inline)) inline Floats sums(Floats (&v)[LANES]) {
    each<log2(LANES)>([&](auto step) {
        constexpr int bit = 1 << step;
        Ints own, other;
        for (int i = 0; i < LANES; ++i) {
            const int from = i & bit ? LANES : 0;
            own[i] = from + i, other[i] = from + (i ^ bit);
        }
        each<LANES / 2 / bit>([&](auto pair) {
            constexpr int first = pair * 2 * bit;
            v[first] = pick(v[first], v[first + bit], own) + pick(v[first], v[first + bit], other);
        });
    });
    return v[0];
}

// e to the power of x: relative error below 2e-7; 0 below -87; NaN stays NaN.
__attribute__((always_inline)) inline Floats exp(Floats x) {
    Floats whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
    Floats f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * f + c;
    p = p * f * f + f + 1.0f;
    Floats power = (Floats)((__builtin_convertvector(whole, Ints) + 127) << 23);
    Floats result = x < -87.0f ? all(0.0f) : p * power;
    return x > 88.0f ? all(INFINITY) : result;  // NaN: so is the polynomial
}

inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

// `n` values in float32, normed where there is a norm, rounded to T in between as the reference does.
template <class T, class W> void read_row(const T* x, int n, const W* norm, float eps, float* out) {
    Floats squares{};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        Floats v = load_lanes(x + i);
        squares += v * v;
        store_lanes(out + i, v);
    }
    float total = sum(squares);
    for (; i < n; ++i) out[i] = to_float(x[i]), total += out[i] * out[i];
    if (!norm) return;
    const float scale = 1 / std::sqrt(total / n + eps);
    for (i = 0; i < n; i += LANES) {
        T narrow[LANES];
        store_lanes(narrow, load_up_to(out + i, n - i) * scale);
        store_lanes(narrow, load_lanes(narrow) * load_up_to(norm + i, n - i));
        store_up_to(out + i, load_lanes(narrow), n - i);
    }
}
