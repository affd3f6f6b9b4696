// What stands between the products of some families: the SiLU or GELU of a gated MLP, scaled sums, multiplied and
// capped values.
#include "pool.h"
#include "simd.h"

// Of rows [rows, n], contiguous but for those of `scale`; bfloat16 where `is_bf16`, else float32.
struct Elementwise {
    const void* x;
    void* out;
    int64_t rows, n, stride;  // of `out`: elements from a row to the next
    float factor, cap;
    int32_t is_bf16;
};

// Contiguous: pieces [count, size] of float32 -> out [size], bfloat16 where `is_bf16`, else float32.
struct Pieces {
    const void* pieces;
    void* out;
    int64_t count, size;
    int32_t is_bf16;
};

namespace {

// work(row, first, count) for pieces of at most a vector.
template <class Work> void each_vector(const Elementwise& a, const Work& work) {
    constexpr int64_t PIECE = 4096;
    const int64_t pieces = (a.n + PIECE - 1) / PIECE;
    pool.run(a.rows * pieces, [&](int64_t i) {
        const int64_t row = i / pieces, first = i % pieces * PIECE, end = first + PIECE < a.n ? first + PIECE : a.n;
        for (int64_t k = first; k < end; k += LANES) work(row, k, int(end - k < LANES ? end - k : LANES));
    });
}

inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }
inline Floats gelu(Floats x) { return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x))); }

template <class T, Floats activate(Floats)> void gate_and_mul(const Elementwise& a) {
    each_vector(a, [&](int64_t row, int64_t k, int count) {
        const T* gate = (const T*)a.x + row * 2 * a.n + k;
        T narrow[LANES];
        store_lanes(narrow, activate(load_up_to(gate, count)));  // rounded in between, as the reference does
        store_up_to((T*)a.out + row * a.n + k, load_lanes(narrow) * load_up_to(gate + a.n, count), count);
    });
}

template <class T> void add_scaled(const Elementwise& a) {
    each_vector(a, [&](int64_t row, int64_t k, int count) {
        T* to = (T*)a.out + row * a.n + k;
        store_up_to(to, load_up_to(to, count) + load_up_to((const T*)a.x + row * a.n + k, count) * a.factor, count);
    });
}

template <class T> void scale(const Elementwise& a) {
    each_vector(a, [&](int64_t row, int64_t k, int count) {
        T* to = (T*)a.out + row * a.stride + k;
        Floats v = load_up_to(to, count) * a.factor;
        if (a.cap) v = tanh(v / a.cap) * a.cap;
        store_up_to(to, v, count);
    });
}

// Of `count` numbers, a power of two, each with its neighbour, then these sums in the same way.
inline Floats tree(const float* x, int64_t count, int64_t stride, int lanes) {
    if (count == 1) return load_up_to(x, lanes);
    return tree(x, count / 2, stride, lanes) + tree(x + count / 2 * stride, count / 2, stride, lanes);
}

template <class T> void add_pieces(const Pieces& a) {
    constexpr int64_t PIECE = 4096;
    pool.run((a.size + PIECE - 1) / PIECE, [&](int64_t i) {
        const int64_t first = i * PIECE, end = first + PIECE < a.size ? first + PIECE : a.size;
        for (int64_t k = first; k < end; k += LANES) {
            const int count = int(end - k < LANES ? end - k : LANES);
            store_up_to((T*)a.out + k, tree((const float*)a.pieces + k, a.count, a.size, count), count);
        }
    });
}

void to_floats(const Elementwise& a) {
    each_vector(a, [&](int64_t row, int64_t k, int count) {
        store_up_to((float*)a.out + row * a.n + k, load_up_to((const bf16*)a.x + row * a.n + k, count), count);
    });
}

}  // namespace

extern "C" void quire_silu_and_mul(const Elementwise* a) {
    a->is_bf16 ? gate_and_mul<bf16, silu>(*a) : gate_and_mul<float, silu>(*a);
}
extern "C" void quire_gelu_and_mul(const Elementwise* a) {
    a->is_bf16 ? gate_and_mul<bf16, gelu>(*a) : gate_and_mul<float, gelu>(*a);
}
extern "C" void quire_add_scaled(const Elementwise* a) { a->is_bf16 ? add_scaled<bf16>(*a) : add_scaled<float>(*a); }
extern "C" void quire_scale(const Elementwise* a) { a->is_bf16 ? scale<bf16>(*a) : scale<float>(*a); }
extern "C" void quire_add_pieces(const Pieces* a) { a->is_bf16 ? add_pieces<bf16>(*a) : add_pieces<float>(*a); }
extern "C" void quire_to_floats(const Elementwise* a) { to_floats(*a); }
