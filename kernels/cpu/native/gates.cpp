// Gates and activations of layers with two projections:
// kernels.reference.{gated,gated_rms_norm,grouped_rms_norm,activation}.
#include "pool.h"
#include "simd.h"

struct Gated {
    // rows of groups · n numbers; weight [n] or [groups · n], null: no norm; gate null: x is it
    const void *x, *gate, *weight;
    void* out;                      // contiguous; may be `x`
    int64_t rows, groups, n, x_stride, gate_stride, weight_stride;  // from a row, or group of `weight`, to the next
    float eps;
    int32_t activation, is_bf16, wide_weight;
    int32_t gate_first;  // the norm is that of x · activation(gate)
    int32_t rounds;      // the norm or, without one, the activation is rounded before they are multiplied
};

namespace {

enum Activation { SILU, SIGMOID, RELU, RELU2, GELU_TANH };

inline Floats activate(int32_t kind, Floats x) {
    switch (kind) {
        case SILU: return x / (1.0f + exp(-x));
        case SIGMOID: return 1.0f / (1.0f + exp(-x));
        case GELU_TANH: return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    }
    const Floats positive = x < 0.0f ? all(0.0f) : x;
    return kind == RELU ? positive : positive * positive;
}

template <class T> inline Floats narrowed(Floats v) {
    T narrow[LANES];
    store_lanes(narrow, v);
    return load_lanes(narrow);
}

template <class T, class W> void one_group(const Gated& a, int64_t row, int64_t group) {
    const T *x = (const T*)a.x + row * a.x_stride + group * a.n,
            *gate = (const T*)a.gate + row * a.gate_stride + group * a.n;
    const W* weight = (const W*)a.weight + group * a.weight_stride;
    T* out = (T*)a.out + (row * a.groups + group) * a.n;
    Floats squares{};
    for (int64_t i = 0; a.weight && i < a.n; i += LANES) {
        const int n = int(a.n - i < LANES ? a.n - i : LANES);
        Floats v = load_up_to(x + i, n);
        if (a.gate_first) v *= activate(a.activation, load_up_to(gate + i, n));
        squares += v * v;  // zeros behind the last one
    }
    const float scale = a.weight ? 1 / std::sqrt(sum(squares) / a.n + a.eps) : 1;
    for (int64_t i = 0; i < a.n; i += LANES) {
        const int n = int(a.n - i < LANES ? a.n - i : LANES);
        Floats v = load_up_to(x + i, n), gated = activate(a.activation, a.gate ? load_up_to(gate + i, n) : v);
        if (!a.gate) {
            store_up_to(out + i, gated, n);
            continue;
        }
        if (!a.weight) {
            store_up_to(out + i, v * (a.rounds ? narrowed<T>(gated) : gated), n);
            continue;
        }
        const Floats w = load_up_to(weight + i, n);
        if (a.gate_first) v = v * gated * scale * w;
        else v = (a.rounds ? narrowed<T>(narrowed<T>(v * scale) * w) : v * scale * w) * gated;
        store_up_to(out + i, v, n);
    }
}

template <class T, class W> void gated(const Gated& a) {
    constexpr int64_t PIECE = 8;
    const int64_t total = a.rows * a.groups;
    pool.run((total + PIECE - 1) / PIECE, [&](int64_t piece) {
        for (int64_t i = piece * PIECE; i < total && i < (piece + 1) * PIECE; ++i)
            one_group<T, W>(a, i / a.groups, i % a.groups);
    });
}

}  // namespace

extern "C" void quire_gated(const Gated* a) {
    if (!a->is_bf16) gated<float, float>(*a);
    else a->wide_weight ? gated<bf16, float>(*a) : gated<bf16, bf16>(*a);
}
