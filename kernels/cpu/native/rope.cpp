// RMSNorm of rows; norm and rotary embedding of queries and keys, and the way of keys and values into the KV cache.
#include <vector>

#include "pool.h"
#include "simd.h"

struct Rope {
    const void* qkv;     // [tokens, heads + 2 kv_heads, head_dim]
    void *query, *keys, *values;
    const void *positions, *q_norm, *k_norm;
    const float* cos_sin;  // [positions, rotary_dim] or null
    const int64_t* slots;
    int64_t qkv_stride, block_stride, head_stride;  // in elements
    int32_t tokens, heads, kv_heads, head_dim, block_size, rotary_dim, interleaved, wide_positions;
    float eps;
    int32_t is_bf16, wide_norm;  // of qkv and all else; norms are float32 all the same
};

namespace {

inline void rotate(float* x, const float* cos_sin, int rotary_dim, bool interleaved) {
    const int half = rotary_dim / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
    for (int i = 0; i < half; ++i) {
        float *first = x + i * step, *second = first + apart, c = cos_sin[i], s = cos_sin[half + i], was = *first;
        *first = was * c - *second * s;
        *second = *second * c + was * s;
    }
}

template <class T, class W> void rope_token(const Rope& a, int64_t token, float* wide) {
    const int64_t position =
        a.wide_positions ? ((const int64_t*)a.positions)[token] : ((const int32_t*)a.positions)[token];
    const int64_t slot = a.slots[token], d = a.head_dim;
    for (int head = 0; head < a.heads + 2 * a.kv_heads; ++head) {
        const bool is_query = head < a.heads, is_value = head >= a.heads + a.kv_heads;
        if (!is_query && slot < 0) break;
        const T* x = (const T*)a.qkv + token * a.qkv_stride + head * d;
        T* to = (T*)a.query + (token * a.heads + head) * d;
        if (!is_query) {
            const int kv_head = is_value ? head - a.heads - a.kv_heads : head - a.heads;
            to = (T*)(is_value ? a.values : a.keys) + slot / a.block_size * a.block_stride + kv_head * a.head_stride +
                 slot % a.block_size * d;
        }
        if (is_value) {
            std::memcpy(to, x, d * sizeof(T));
            continue;
        }
        read_row(x, int(d), (const W*)(is_query ? a.q_norm : a.k_norm), a.eps, wide);
        if (a.cos_sin) rotate(wide, a.cos_sin + position * a.rotary_dim, a.rotary_dim, a.interleaved);
        for (int i = 0; i < d; i += LANES) store_up_to(to + i, load_up_to(wide + i, int(d) - i), int(d) - i);
    }
}

template <class T, class W> void rope(const Rope& a) {
    constexpr int PIECE = 4;
    pool.run((a.tokens + PIECE - 1) / PIECE, [&](int64_t piece) {
        std::vector<float> wide(a.head_dim);
        for (int64_t t = piece * PIECE; t < a.tokens && t < (piece + 1) * PIECE; ++t)
            rope_token<T, W>(a, t, wide.data());
    });
}

struct Norm {
    const void *x, *weight;  // [rows, n], [n]
    void* out;
    int64_t rows;
    int32_t n, is_bf16, wide_norm;
    float eps;
};

template <class T, class W> void norm_rows(const Norm& a) {
    constexpr int PIECE = 4;
    pool.run((a.rows + PIECE - 1) / PIECE, [&](int64_t piece) {
        std::vector<float> wide(a.n);
        for (int64_t r = piece * PIECE; r < a.rows && r < (piece + 1) * PIECE; ++r) {
            read_row((const T*)a.x + r * a.n, a.n, (const W*)a.weight, a.eps, wide.data());
            for (int i = 0; i < a.n; i += LANES)
                store_up_to((T*)a.out + r * a.n + i, load_up_to(&wide[i], a.n - i), a.n - i);
        }
    });
}

}  // namespace

extern "C" void quire_rope_and_store(const Rope* a) {
    if (!a->is_bf16) rope<float, float>(*a);
    else if (a->wide_norm) rope<bf16, float>(*a);
    else rope<bf16, bf16>(*a);
}

extern "C" void quire_rms_norm(const Norm* a) {
    if (!a->is_bf16) norm_rows<float, float>(*a);
    else if (a->wide_norm) norm_rows<bf16, float>(*a);
    else norm_rows<bf16, bf16>(*a);
}
