// Causal convolutions of recurrent layers over states in blocks, see kernels.reference.recurrent.
#include "pool.h"
#include "simd.h"

struct Convolution {
    // x [tokens, stride]; weight [channels, length], the newest token last; bias may be null
    const void *x, *weight, *bias;
    void *inputs, *out;             // inputs [blocks, ring, channels]; out [tokens, channels]
    const int32_t *tables, *rows, *query_start, *context_lens;
    int64_t seqs, tokens, stride, channels, num_rows, max_blocks, block_size;
    int32_t length, ring, gated, is_bf16;  // gated: x is B, C and X of each channel; else the result's SiLU is taken
};

namespace {

constexpr int64_t PIECE = 256, MOST = 128;  // channels of a piece of work; inputs that a block holds, at most

template <class T> inline Floats rounded_to(Floats v) {
    T narrow[LANES];
    store_lanes(narrow, v);
    return load_lanes(narrow);
}

template <class T> void clear(const Convolution& a, int64_t start, int64_t end, int64_t first, int64_t count) {
    for (int64_t t = start; t < end; ++t) std::memset((T*)a.out + t * a.channels + first, 0, count * sizeof(T));
}

// `count` channels from `first` on, of one sequence.
template <class T> void convolve(const Convolution& a, int64_t seq, int64_t first, int64_t count) {
    const int64_t start = a.query_start[seq], end = a.query_start[seq + 1];
    if (a.rows[seq] == a.num_rows - 1) return clear<T>(a, start, end, first, count);
    if (start >= end) return;
    float taps[MOST][PIECE], past[MOST][PIECE], offset[PIECE] = {};
    for (int64_t c = 0; c < count; ++c) {
        for (int k = 0; k < a.length; ++k) taps[k][c] = to_float(((const T*)a.weight)[(first + c) * a.length + k]);
        if (a.bias) offset[c] = to_float(((const T*)a.bias)[first + c]);
    }
    const int64_t begin = a.context_lens[seq] - (end - start);  // position of the first token
    const int32_t* table = a.tables + a.rows[seq] * a.max_blocks;
    const int64_t known = begin < a.length - 1 ? begin : a.length - 1;
    if (known) {
        const T* source = (const T*)a.inputs + table[(begin - 1) / a.block_size] * a.ring * a.channels + first;
        for (int64_t p = begin - known; p < begin; ++p)
            for (int64_t c = 0; c < count; ++c) past[p % a.ring][c] = to_float(source[p % a.ring * a.channels + c]);
    }
    for (int64_t t = start; t < end; ++t) {
        const int64_t p = begin + t - start;
        const T* x = (const T*)a.x + t * a.stride + first;
        T* out = (T*)a.out + t * a.channels + first;
        const int64_t lags = p + 1 < a.length ? p + 1 : a.length;  // inputs that there are
        float* lagging[MOST];
        for (int64_t lag = 0; lag < lags; ++lag) lagging[lag] = past[(p - lag) % a.ring];
        for (int64_t c = 0; c < count; c += LANES) {
            const int n = int(count - c < LANES ? count - c : LANES);
            Floats value = load_up_to(x + c, n);
            if (a.gated) value = rounded_to<T>(value * load_up_to(x + 2 * a.channels + c, n));
            store_lanes(lagging[0] + c, value);
            Floats sum = value * load_lanes(&taps[a.length - 1][c]);
            for (int64_t lag = 1; lag < lags; ++lag)
                sum += load_lanes(lagging[lag] + c) * load_lanes(&taps[a.length - 1 - lag][c]);
            sum = rounded_to<T>(sum + load_lanes(&offset[c]));
            sum = a.gated ? sum * load_up_to(x + a.channels + c, n) : sum / (1.0f + exp(-sum));
            store_up_to(out + c, sum, n);
        }
        const int32_t block = table[p / a.block_size];
        if (block < 0 || (t + 1 < end && (p + 1) % a.block_size)) continue;
        T* target = (T*)a.inputs + block * a.ring * a.channels + first;
        for (int64_t q = p; q >= 0 && q > p - a.ring && q >= begin - known; --q)
            for (int64_t c = 0; c < count; c += LANES)
                store_up_to(target + q % a.ring * a.channels + c, load_lanes(&past[q % a.ring][c]),
                            int(count - c < LANES ? count - c : LANES));
    }
}

template <class T> void run(const Convolution& a) {
    const int64_t pieces = (a.channels + PIECE - 1) / PIECE;
    pool.run(a.seqs * pieces, [&](int64_t i) {
        const int64_t first = i % pieces * PIECE;
        convolve<T>(a, i / pieces, first, a.channels - first < PIECE ? a.channels - first : PIECE);
    });
    clear<T>(a, a.query_start[a.seqs], a.tokens, 0, a.channels);
}

}  // namespace

extern "C" void quire_causal_conv(const Convolution* a) { a->is_bf16 ? run<bf16>(*a) : run<float>(*a); }
