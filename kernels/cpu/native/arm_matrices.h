// ARM's instructions that multiply small matrices: two tokens and two rows of W, of eight channels of eight bits (I8MM)
// or four of bfloat16 (BF16). Sums lie as token 0 row 0, token 0 row 1, token 1 row 0, token 1 row 1.
#pragma once

#include "isa.h"

namespace arm {

// Rows of W: of two vectors with the same rows, the first channels and the next ones, the first or the last two rows as
// a whole.
template <class V> inline V first_rows(V a, V b) { return (V)vzip1q_u32((uint32x4_t)a, (uint32x4_t)b); }
template <class V> inline V last_rows(V a, V b) { return (V)vzip2q_u32((uint32x4_t)a, (uint32x4_t)b); }

// The same eight bytes of two tokens.
inline Bytes two_tokens(const char* a, const char* b) {
    return (Bytes)vcombine_u8(vld1_u8((const uint8_t*)a), vld1_u8((const uint8_t*)b));
}

#if defined(QUIRE_I8MM)
inline Ints dot(Ints sums, Bytes x, Bytes w) { return (Ints)vmmlaq_s32((int32x4_t)sums, (int8x16_t)x, (int8x16_t)w); }
#endif
#if defined(QUIRE_BFMM)
inline Floats dot(Floats sums, Bytes x, Words w) {
    return (Floats)vbfmmlaq_f32((float32x4_t)sums, (bfloat16x8_t)x, (bfloat16x8_t)w);
}
#endif

// Of the sums with the first and with the last two rows, those of a token.
template <int TOKEN, class V> inline V of_token(V first, V last) {
    if constexpr (TOKEN == 0) return (V)vzip1q_u64((uint64x2_t)first, (uint64x2_t)last);
    else return (V)vzip2q_u64((uint64x2_t)first, (uint64x2_t)last);
}

}  // namespace arm
