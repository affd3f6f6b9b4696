// What the instruction set gives that the compiler was told to use: vectors of the length of its registers, the tile of
// accumulators that these hold, and the dot products of bfloat16 and of eight bits, or what comes nearest to them.
//
//                 vector   tile    products of bfloat16     products of codes
//   AVX-512        64 B    6 x 4   BF16, else in float32    VNNI, else pairs in 16 bits; AMX beside them: see amx.h
//   AVX2 and FMA   32 B    6 x 2   in float32               AVX-VNNI, else pairs in 16 bits
//   NEON           16 B    6 x 4   BF16, else in float32    DotProd, else pairs in 16 bits; I8MM for several tokens
//   any other      16 B    6 x 2   in float32               in 32 bits
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define QUIRE_AVX512
#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define QUIRE_AMX
#endif
constexpr int VECTOR = 64, REGISTERS = 32, WIDE = 4;
#elif defined(__AVX2__) && defined(__FMA__)
#define QUIRE_AVX2
constexpr int VECTOR = 32, REGISTERS = 16, WIDE = 2;
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define QUIRE_NEON
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define QUIRE_I8MM
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define QUIRE_BFMM
#endif
constexpr int VECTOR = 16, REGISTERS = 32, WIDE = 4;
#else
constexpr int VECTOR = 16, REGISTERS = 16, WIDE = 2;
#endif
constexpr int LANES = VECTOR / 4;  // of 32 bits
constexpr int TALL = 6;            // a register tile: TALL x WIDE accumulators

typedef float Floats __attribute__((vector_size(VECTOR)));
typedef int32_t Ints __attribute__((vector_size(VECTOR)));
typedef uint32_t Words __attribute__((vector_size(VECTOR)));
typedef int16_t Shorts __attribute__((vector_size(VECTOR)));
typedef uint8_t Bytes __attribute__((vector_size(VECTOR)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR / 2)));
typedef uint8_t Quarters __attribute__((vector_size(VECTOR / 4)));
typedef int8_t SignedQuarters __attribute__((vector_size(VECTOR / 4)));

inline Floats all(float x) { return x - Floats{}; }  // a sum with zero would be computed: it changes -0
inline Ints all(int32_t x) { return Ints{} + x; }
inline Words all(uint32_t x) { return Words{} + x; }

// Of 32 bits each, the low halves.
inline Halves low_halves(Words v) {
#if defined(QUIRE_AVX2)
    const __m256i wide = (__m256i)(v & 0xffff);
    return (Halves)_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
#else
    return __builtin_convertvector(v, Halves);
#endif
}

// Each in 32 bits, with zeros before; GCC's conversion of vectors takes six instructions for it.
inline Words widened(Halves v) {
#if defined(QUIRE_AVX512)
    return (Words)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(QUIRE_AVX2)
    return (Words)_mm256_cvtepu16_epi32((__m128i)v);
#else
    return __builtin_convertvector(v, Words);
#endif
}
inline Words widened(Quarters v) {
#if defined(QUIRE_AVX512)
    return (Words)_mm512_cvtepu8_epi32((__m128i)v);
#elif defined(QUIRE_AVX2)
    return (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)v));
#else
    return __builtin_convertvector(v, Words);
#endif
}
inline Ints widened(SignedQuarters v) {  // each with its sign
#if defined(QUIRE_AVX512)
    return (Ints)_mm512_cvtepi8_epi32((__m128i)v);
#elif defined(QUIRE_AVX2)
    return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)v));
#else
    return __builtin_convertvector(v, Ints);
#endif
}

// acc[i] + w[2i] · x[2i] + w[2i + 1] · x[2i + 1] of bfloat16 pairs; `x` is one pair, for all lanes.
#if defined(QUIRE_AVX512) && defined(__AVX512BF16__)
constexpr bool DOTS_BF16 = true;
inline Floats dot(Floats acc, Words w, uint32_t x) {
    return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(x)));
}
#elif defined(QUIRE_BFMM)
constexpr bool DOTS_BF16 = true;  // by `dot` in arm_matrices.h
inline Floats dot(Floats acc, Words, uint32_t) { return acc; }
#else
constexpr bool DOTS_BF16 = false;  // products take x in float32, and widen W in registers
inline Floats dot(Floats acc, Words, uint32_t) { return acc; }
#endif

// Codes of W: `codes` makes of a vector of bytes what `dot` takes. acc[i] + the sum over j < 4 of w[4i + j] · x[4i +
// j], exact in 32 bits; w of eight bits, with BYTE_OFFSET added when they are packed; x from -127 to 127: one group of
// four, for all lanes. Codes of four bits, from 0 to 15, need no `codes`. Where QUIRE_PAIRS, products of two of them
// are summed up in 16 bits, in which eight such sums have room.
#if (defined(QUIRE_AVX512) && defined(__AVX512VNNI__)) || (defined(QUIRE_AVX2) && defined(__AVXVNNI__))
constexpr int BYTE_OFFSET = 128;
#define QUIRE_PAIRS 0
using Codes = Bytes;
inline Codes codes(Bytes w) { return w; }
inline Ints dot(Ints acc, Bytes w, uint32_t x) {
#if defined(QUIRE_AVX512)
    return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(int(x)));
#else
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(int(x)));
#endif
}
#elif defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
#define QUIRE_PAIRS 1
constexpr int BYTE_OFFSET = 0;
#if defined(QUIRE_AVX512)
struct Codes {
    Bytes magnitude;
    __mmask64 negative;
};
inline Codes codes(Bytes w) { return {(Bytes)_mm512_abs_epi8((__m512i)w), _mm512_movepi8_mask((__m512i)w)}; }
inline Words with_signs(Words x, const Codes& w) {
    return (Words)_mm512_mask_sub_epi8((__m512i)x, w.negative, __m512i{}, (__m512i)x);
}
inline Shorts pairs(Bytes w, Words x) { return (Shorts)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
inline Ints sums(Shorts v) { return (Ints)_mm512_madd_epi16((__m512i)v, _mm512_set1_epi16(1)); }
#else
struct Codes {
    Bytes magnitude, w;
};
inline Codes codes(Bytes w) { return {(Bytes)_mm256_abs_epi8((__m256i)w), w}; }
inline Words with_signs(Words x, const Codes& w) { return (Words)_mm256_sign_epi8((__m256i)x, (__m256i)w.w); }
inline Shorts pairs(Bytes w, Words x) { return (Shorts)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
inline Ints sums(Shorts v) { return (Ints)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi16(1)); }
#endif
inline Ints dot(Ints acc, const Codes& w, uint32_t x) { return acc + sums(pairs(w.magnitude, with_signs(all(x), w))); }
#else
constexpr int BYTE_OFFSET = 0;
#define QUIRE_PAIRS 0
using Codes = Bytes;
inline Codes codes(Bytes w) { return w; }
inline Ints dot(Ints acc, Bytes w, uint32_t x) {
#if defined(QUIRE_NEON) && defined(__ARM_FEATURE_DOTPROD)
    return (Ints)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)all(x));
#elif defined(QUIRE_NEON)
    const int8x16_t codes = (int8x16_t)w, y = (int8x16_t)all(x);
    return (Ints)vpadalq_s16(
        (int32x4_t)acc, vpaddq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(y)), vmull_high_s8(codes, y)));
#else
    for (int j = 0; j < 4; ++j) acc += (((Ints)w << (24 - 8 * j)) >> 24) * int32_t(int8_t(x >> (8 * j)));
    return acc;
#endif
}
#endif
