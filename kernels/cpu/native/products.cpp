// x Wᵀ for few and for many tokens, with the norm in front of it and the bias, the residual sum or the SwiGLU behind
// it.
//
// Rows of W lie in tiles of WIDE vectors' lanes. A tile is read from end to end: channels in order, as many at a time
// as fill 32 bits of each lane (one of float32, two of bfloat16, four of 8 bits, two times four of 4 bits: low nibbles,
// then high ones), the vectors side by side. Scales and zero points of groups lie the same way. (Channels of bfloat16:
// as BF16_CHANNELS says.) Of 6 bits, four times four: two lines of nibbles, then one of upper bits, those of the first
// channels the lowest.
//
// Every sum is that of its token and row alone, in the same order of the channels, however many tokens are computed at
// once.
#include <iterator>
#include <vector>

#include "pool.h"
#include "simd.h"
#ifdef QUIRE_AMX
#include "amx.h"
#endif
#ifdef QUIRE_NEON
#include "arm_matrices.h"
#endif

Pool pool;

extern "C" void quire_set_threads(int32_t threads) { pool.threads = threads; }

enum Kind : int32_t { FLOAT32, BFLOAT16, INT8, INT4, INT6 };
enum Then : int32_t { STORE, ADD, SWIGLU };

struct Weight {
    Kind kind;
    int32_t rows, channels;  // channels: a multiple of what fills 32 bits
    int32_t group;           // codes: channels that share a scale of x, and of W where `scale` has groups
    const char* data;
    const void* scale;        // float32 [rows] where the groups of W are whole rows; else [tiles, groups, WIDE, LANES]
    const bf16* short_scale;  // in its place [tiles, groups, WIDE, LANES]
    const float* zero;        // null, or zero point times scale: [tiles, groups, WIDE, LANES]
    // [tiles, groups, WIDE, LANES]: the numbers that `scale` and `zero`, then one for each 2^span groups, are
    // multiplied by; or null.
    const int8_t *scale_steps, *zero_steps;
    int32_t grouped, span, offset;  // offset: of codes
};

// x as a product reads it: padded with zeros to the weight's channels.
struct Rows {
    const char* data;     // float32, bfloat16 or int8 [tokens, channels]; for AMX as amx.h says
    int64_t row_bytes;
    const float* scale;   // INT8, INT4: [tokens, groups]
    const int32_t* sum;   // of the codes
};

namespace {

constexpr int TILE_ROWS = WIDE * LANES, LINE = WIDE * VECTOR;
// Tokens of a register tile: few registers hold fewer accumulators beside unpacked weights. Measured.
constexpr int tall(Kind kind) {
    if (REGISTERS == 32 || kind <= BFLOAT16 || (kind == INT8 && !QUIRE_PAIRS)) return TALL;
    return kind == INT4 && QUIRE_PAIRS ? 5 : 4;
}
// side by side: few registers have no room for both, widened
constexpr int BF16_CHANNELS = DOTS_BF16 || REGISTERS == 32 ? 2 : 1;
constexpr int AHEAD = 4096;         // bytes by which memory is asked for before it is read
constexpr int MANY = 3;             // tokens of a register tile that leave time to ask for what comes much later, too
constexpr int PIECE_BYTES = 65536;  // of W that a thread takes at once, at least
// about as much of x is multiplied with one tile after the other, so that the second cache holds it
constexpr int X_BYTES = 262144;
constexpr int LEAST = 11 * TALL;    // tokens of x for which W is read again
constexpr int X_BYTES_AMX = 1048576;  // in its place for AMX, which would wait for W more often
constexpr int ASKING = 3 * TALL;    // tokens that are multiplied until the next tile is there

inline uint32_t word(const char* p) { return load<uint32_t>(p); }

// Bytes of W that are multiplied at once, the next ones on their way.
template <class V> __attribute__((always_inline)) inline void load_line(const char* at, V (&v)[WIDE]) {
    each<WIDE>([&](auto n) { v[n] = load<V>(at + n * VECTOR); });
    each<(LINE + 63) / 64>([&](auto n) { __builtin_prefetch(at + n * 64 + AHEAD); });
}
// the second cache shall have it
template <int M> __attribute__((always_inline)) inline void ask_for(const char* at, int bytes) {
    if constexpr (M >= MANY)
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

inline int64_t tile_bytes(const Weight& w) {
    const int64_t words = int64_t(w.channels) * LINE;
    return w.kind == INT6 ? words * 3 / 16 : words >> w.kind;  // other kinds have half the bits of the last
}

template <int M> using Sums = Floats[M][WIDE];  // of M tokens

// W in float32 or bfloat16 (T), x in float32. What lies `next` bytes behind the tile is asked for meanwhile.
template <class T, int M>
inline void dot_floats(const Weight& w, const char* at, int64_t next, const char* const* x, Sums<M>& acc) {
    for (int64_t k = 0; k < w.channels; ++k, at += TILE_ROWS * sizeof(T)) {
        Floats v[WIDE];
        each<WIDE>([&](auto n) { v[n] = load_lanes((const T*)at + n * LANES); });
        for (int i = 0; i < TILE_ROWS * int(sizeof(T)); i += 64) __builtin_prefetch(at + i + AHEAD);
        ask_for<M>(at + next, TILE_ROWS * sizeof(T));
        each<M>([&](auto m) {
            Floats y = all(load<float>(x[m] + k * 4));
            each<WIDE>([&](auto n) { acc[m][n] += v[n] * y; });
        });
    }
}

template <int M>
inline void dot_pairs(const Weight& w, const char* at, int64_t next, const char* const* x, Sums<M>& acc) {
    for (int64_t k = 0; k < w.channels / 2; ++k, at += LINE) {
        Words v[WIDE];
        load_line(at, v);
        ask_for<M>(at + next, LINE);
        if constexpr (DOTS_BF16) {
            each<M>([&](auto m) {
                uint32_t y = word(x[m] + k * 4);
                each<WIDE>([&](auto n) { acc[m][n] = dot(acc[m][n], v[n], y); });
            });
        } else {
            Floats wide[WIDE];
            each<WIDE>([&](auto n) { wide[n] = (Floats)(v[n] << 16); });
            each<M>([&](auto m) {
                Floats y = all(load<float>(x[m] + k * 8));
                each<WIDE>([&](auto n) { acc[m][n] += wide[n] * y; });
            });
            each<WIDE>([&](auto n) { wide[n] = (Floats)(v[n] & 0xffff0000u); });
            each<M>([&](auto m) {
                Floats y = all(load<float>(x[m] + k * 8 + 4));
                each<WIDE>([&](auto n) { acc[m][n] += wide[n] * y; });
            });
        }
    }
}

__attribute__((always_inline)) inline void load_nibbles(const char* at, Bytes (&low)[WIDE], Bytes (&high)[WIDE]) {
    load_line(at, high);
    each<WIDE>([&](auto n) { low[n] = high[n] & 15, high[n] = (Bytes)((Words)high[n] >> 4) & 15; });
}

// Codes of 6 bits of eight channels: those of a unit of three lines that line HALF has the nibbles of.
template <int HALF>
__attribute__((always_inline)) inline void load_sixes(const char* at, Bytes (&low)[WIDE], Bytes (&high)[WIDE]) {
    each<WIDE>([&](auto n) {
        const Words nibbles = load<Words>(at + HALF * LINE + n * VECTOR);
        const Words upper = load<Words>(at + 2 * LINE + n * VECTOR);
        low[n] = (Bytes)((nibbles & 0x0f0f0f0f) | ((HALF ? upper : upper << 4) & 0x30303030));
        high[n] = (Bytes)((nibbles >> 4 & 0x0f0f0f0f) | ((HALF ? upper >> 2 : upper << 2) & 0x30303030));
    });
}

template <int M, int HALF>
__attribute__((always_inline)) inline void dot_sixes(
    const char* at, const char* const* x, int64_t channel, Ints (&part)[M][WIDE]) {
    Bytes low[WIDE], high[WIDE];
    load_sixes<HALF>(at, low, high);
    each<M>([&](auto m) {
        const char* y = x[m] + channel + HALF * 8;
#if QUIRE_PAIRS
        const Words first = all(word(y)), last = all(word(y + 4));
        each<WIDE>([&](auto n) { part[m][n] += sums(pairs(low[n], first) + pairs(high[n], last)); });
#else
        each<WIDE>([&](auto n) { part[m][n] = dot(part[m][n], low[n], word(y)); });
        each<WIDE>([&](auto n) { part[m][n] = dot(part[m][n], high[n], word(y + 4)); });
#endif
    });
}

#if QUIRE_PAIRS
// The next four lines of nibbles, summed up in 16 bits; not inlined, so that these sums stay in registers.
template <int M>
__attribute__((noinline)) void dot_nibbles(const char*& at, const char* const* x, int64_t& k, Ints (&part)[M][WIDE]) {
    Shorts sum[M][WIDE] = {};
    for (int line = 0; line < 4; ++line, ++k, at += LINE) {
        Bytes low[WIDE], high[WIDE];
        load_nibbles(at, low, high);
        each<M>([&](auto m) {
            const Words y = all(word(x[m] + k * 8)), z = all(word(x[m] + k * 8 + 4));
            each<WIDE>([&](auto n) { sum[m][n] += pairs(low[n], y); });
            each<WIDE>([&](auto n) { sum[m][n] += pairs(high[n], z); });
        });
    }
    each<M>([&](auto m) { each<WIDE>([&](auto n) { part[m][n] += sums(sum[m][n]); }); });
}
#else
template <int M>
__attribute__((always_inline)) inline void dot_nibbles(
    const char*& at, const char* const* x, int64_t& k, Ints (&part)[M][WIDE]) {
    Bytes low[WIDE], high[WIDE];
    load_nibbles(at, low, high);
    each<M>([&](auto m) {
        const uint32_t y = word(x[m] + k * 8), z = word(x[m] + k * 8 + 4);
        each<WIDE>([&](auto n) { part[m][n] = dot(part[m][n], low[n], y); });
        each<WIDE>([&](auto n) { part[m][n] = dot(part[m][n], high[n], z); });
    });
    ++k, at += LINE;
}
#endif

#ifdef QUIRE_BFMM
template <int M>
inline void dot_matrices(const Weight& w, const char* at, int64_t next, const char* const* x, Sums<M>& acc) {
    constexpr int PAIRS = (M + 1) / 2;  // of tokens; one without another counts twice
    Floats sum[PAIRS][WIDE][2] = {};
    const int64_t lines = w.channels / 2;
    for (int64_t k = 0; k < lines; k += 2, at += 2 * LINE) {
        Words low[WIDE], high[WIDE] = {};
        Bytes y[PAIRS];
        load_line(at, low);
        if (k + 1 < lines) load_line(at + LINE, high);
        ask_for<M>(at + next, 2 * LINE);
        each<PAIRS>([&](auto p) {
            const char *one = x[2 * p] + k * 4, *other = x[2 * p + 1 < M ? 2 * p + 1 : 2 * p] + k * 4;
            if (k + 1 < lines) y[p] = arm::two_tokens(one, other);
            else y[p] = (Bytes)Words{word(one), 0, word(other), 0};
        });
        each<WIDE>([&](auto n) {
            const Words first = arm::first_rows(low[n], high[n]), last = arm::last_rows(low[n], high[n]);
            each<PAIRS>([&](auto p) {
                sum[p][n][0] = arm::dot(sum[p][n][0], y[p], first), sum[p][n][1] = arm::dot(sum[p][n][1], y[p], last);
            });
        });
    }
    each<M>([&](auto m) {
        each<WIDE>([&](auto n) { acc[m][n] = arm::of_token<m % 2>(sum[m / 2][n][0], sum[m / 2][n][1]); });
    });
}
#endif

#ifdef QUIRE_I8MM
// Adds the products of a group's codes, from line `k` up to `end`.
template <Kind KIND, int M>
inline void dot_code_matrices(const char*& at, const char* const* x, int64_t& k, int64_t end, Ints (&part)[M][WIDE]) {
    constexpr int PAIRS = (M + 1) / 2, LINES = KIND == INT4 ? 1 : 2;  // of eight channels
    Ints sum[PAIRS][WIDE][2] = {};
    for (; k < end; k += LINES, at += LINES * LINE) {
        Bytes low[WIDE], high[WIDE], y[PAIRS];
        if constexpr (KIND == INT4) load_nibbles(at, low, high);
        else load_line(at, low), load_line(at + LINE, high);
        each<PAIRS>([&](auto p) {
            y[p] = arm::two_tokens(x[2 * p] + k * 8 / LINES, x[2 * p + 1 < M ? 2 * p + 1 : 2 * p] + k * 8 / LINES);
        });
        each<WIDE>([&](auto n) {
            const Bytes first = arm::first_rows(low[n], high[n]), last = arm::last_rows(low[n], high[n]);
            each<PAIRS>([&](auto p) {
                sum[p][n][0] = arm::dot(sum[p][n][0], y[p], first), sum[p][n][1] = arm::dot(sum[p][n][1], y[p], last);
            });
        });
    }
    each<M>([&](auto m) {
        each<WIDE>([&](auto n) { part[m][n] += arm::of_token<m % 2>(sum[m / 2][n][0], sum[m / 2][n][1]); });
    });
}
#endif

struct Steps {};  // scales that are whole multiples of their span's

inline Floats in_steps(const Weight& w, const void* of_spans, const int8_t* steps, int tile, int64_t group, int n) {
    const int64_t groups = w.channels / w.group, spans = groups >> w.span;
    const Ints step = widened(load<SignedQuarters>(steps + (tile * groups + group) * TILE_ROWS + n * LANES));
    return __builtin_convertvector(step, Floats) *
           load_lanes((const float*)of_spans + (tile * spans + (group >> w.span)) * TILE_ROWS + n * LANES);
}

// Adds the sums of a group's codes, scaled. SCALES: of groups of W, of type bf16 or float, or Steps; void: those of
// rows come later.
template <class SCALES, int M>
__attribute__((always_inline)) inline void add_group(
    const Weight& w, const float* x_scale, int tile, int64_t group, Ints (&part)[M][WIDE], Sums<M>& acc) {
    const int64_t groups = w.channels / w.group;
    const void* scale = std::is_same_v<SCALES, bf16> ? (const void*)w.short_scale : w.scale;
    Floats by[WIDE];
    each<WIDE>([&](auto n) {
        if constexpr (std::is_same_v<SCALES, Steps>) by[n] = in_steps(w, scale, w.scale_steps, tile, group, n);
        else if constexpr (!std::is_void_v<SCALES>)
            by[n] = load_lanes((const SCALES*)scale + (tile * groups + group) * TILE_ROWS + n * LANES);
    });
    each<M>([&](auto m) {
        const float y = x_scale[m * groups + group];
        each<WIDE>([&](auto n) {
            Floats sum = __builtin_convertvector(part[m][n], Floats);
            if constexpr (std::is_void_v<SCALES>) acc[m][n] += sum * y;
            else acc[m][n] += sum * by[n] * y;
        });
    });
}

template <int M> inline void subtract_zeros(const Weight& w, const Rows& rows, int tile, int token, Sums<M>& acc) {
    if (!w.zero) return;
    const int64_t groups = w.channels / w.group;
    for (int64_t g = 0; g < groups; ++g) {
        Floats zero[WIDE];
        each<WIDE>([&](auto n) {
            if (w.zero_steps) zero[n] = in_steps(w, w.zero, w.zero_steps, tile, g, n);
            else zero[n] = load_lanes(w.zero + (tile * groups + g) * TILE_ROWS + n * LANES);
        });
        each<M>([&](auto m) {
            const int64_t i = (token + m) * groups + g;
            const float y = rows.scale[i] * float(rows.sum[i]);
            each<WIDE>([&](auto n) { acc[m][n] -= zero[n] * y; });
        });
    }
}

template <Kind KIND, class SCALES, int M>
inline void dot_codes(
    const Weight& w, const char* at, const char* const* x, const Rows& rows, int tile, int token, Sums<M>& acc) {
    constexpr int PER_LINE = KIND == INT6 ? 16 : KIND == INT4 ? 8 : 4;  // of INT6: per unit of three
    const int64_t groups = w.channels / w.group, lines = w.group / PER_LINE;
    const float* x_scale = rows.scale + token * groups;
    const int32_t* x_sum = rows.sum + token * groups;
    for (int64_t g = 0, k = 0; g < groups; ++g) {
        Ints part[M][WIDE];
        each<M>([&](auto m) {
            Ints start = all(-w.offset * x_sum[m * groups + g]);
            each<WIDE>([&](auto n) { part[m][n] = start; });
        });
        const int64_t end = k + lines;
#ifdef QUIRE_I8MM
        if constexpr (M > 1 && KIND != INT6) dot_code_matrices<KIND, M>(at, x, k, end, part);
#endif
        while (k < end) {
            if constexpr (KIND == INT8) {
                Bytes v[WIDE];
                load_line(at, v);
                Codes c[WIDE];
                each<WIDE>([&](auto n) { c[n] = codes(v[n]); });
                each<M>([&](auto m) {
                    uint32_t y = word(x[m] + k * 4);
                    each<WIDE>([&](auto n) { part[m][n] = dot(part[m][n], c[n], y); });
                });
                ++k, at += LINE;
            } else if constexpr (KIND == INT6) {
                dot_sixes<M, 0>(at, x, k * 16, part);
                dot_sixes<M, 1>(at, x, k * 16, part);
                for (int i = 0; i < 3 * LINE; i += 64) __builtin_prefetch(at + i + AHEAD);
                ++k, at += 3 * LINE;
            } else {
                dot_nibbles<M>(at, x, k, part);
            }
        }
        add_group<SCALES, M>(w, x_scale, tile, g, part, acc);
    }
    subtract_zeros<M>(w, rows, tile, token, acc);
}

// The products of M tokens, from `token` on, and a tile: [M, WIDE]. `next`: see `dot_floats`; of codes there are too
// few bytes.
template <Kind KIND, class SCALES, int M>
void multiply(const Weight& w, const Rows& rows, int tile, int token, int64_t next, Floats* to) {
    const char *at = w.data + tile * tile_bytes(w), *x[M];
    each<M>([&](auto m) { x[m] = rows.data + (token + m) * rows.row_bytes; });
    Sums<M> acc = {};
    if constexpr (KIND == FLOAT32) dot_floats<float, M>(w, at, next, x, acc);
    else if constexpr (KIND == BFLOAT16 && BF16_CHANNELS == 1) dot_floats<bf16, M>(w, at, next, x, acc);
#ifdef QUIRE_BFMM
    else if constexpr (KIND == BFLOAT16) dot_matrices<M>(w, at, next, x, acc);
#endif
    else if constexpr (KIND == BFLOAT16) dot_pairs<M>(w, at, next, x, acc);
    else dot_codes<KIND, SCALES, M>(w, at, x, rows, tile, token, acc);
    each<WIDE>([&](auto n) {
        Floats scale = all(1.0f);
        if (KIND == INT8 && std::is_void_v<SCALES>)
            scale = load_lanes((const float*)w.scale + tile * TILE_ROWS + n * LANES);
        each<M>([&](auto m) { to[m * WIDE + n] = acc[m][n] * scale; });
    });
}

using Multiply = void (*)(const Weight&, const Rows&, int tile, int token, int64_t next, Floats* to);
template <Kind KIND, class SCALES> Multiply multiply_codes(int tokens) {
    return tokens == 1   ? multiply<KIND, SCALES, 1>
           : tokens == 2 ? multiply<KIND, SCALES, 2>
           : tokens == 4 ? multiply<KIND, SCALES, 4>
                         : multiply<KIND, SCALES, tall(KIND)>;
}
template <Kind KIND> Multiply multiply_floats(int tokens) {
    constexpr Multiply OF[] = {multiply<KIND, void, 1>, multiply<KIND, void, 2>, multiply<KIND, void, 3>,
                               multiply<KIND, void, 4>, multiply<KIND, void, 5>, multiply<KIND, void, 6>};
    static_assert(std::size(OF) == TALL);
    return OF[tokens - 1];
}
inline Multiply multiply_for(const Weight& w, int tokens) {
    if (w.kind == FLOAT32) return multiply_floats<FLOAT32>(tokens);
    if (w.kind == BFLOAT16) return multiply_floats<BFLOAT16>(tokens);
    if (w.kind == INT6) return multiply_codes<INT6, Steps>(tokens);
    if (w.kind == INT8 && w.scale_steps) return multiply_codes<INT8, Steps>(tokens);
    if (w.kind == INT8) return w.grouped ? multiply_codes<INT8, float>(tokens) : multiply_codes<INT8, void>(tokens);
    if (w.scale_steps) return multiply_codes<INT4, Steps>(tokens);
    return w.short_scale ? multiply_codes<INT4, bf16>(tokens) : multiply_codes<INT4, float>(tokens);
}
#ifdef QUIRE_AMX
// How many words of 32 bits a tile register takes of a token; 0: AVX-512 computes. Codes are multiplied exactly either
// way, by AVX-512 where it was measured to be faster; bfloat16 is rounded otherwise, so it is always multiplied in the
// same way.
inline int tile_words(const Weight& w, int tokens) {
    if (w.kind == FLOAT32 || (w.kind >= INT8 && tokens < (w.kind == INT8 ? 8 : 64)) || !amx::permitted()) return 0;
    const int words = w.kind == BFLOAT16 ? w.channels / 2 : w.group / 4;
    return words % 16 == 0 ? 16 : words % 8 == 0 ? 8 : words == 4 ? 4 : 0;
}

// Memory of a thread for at least so many elements, at a cache line's start.
template <class T> T* lines(std::vector<char>& memory, int64_t count) {
    if (memory.size() < count * sizeof(T) + 64) memory.resize(count * sizeof(T) + 64);
    return (T*)(memory.data() + (-(uintptr_t)memory.data() & 63));
}

// A tile, its codes as bytes.
inline const char* tile_of_bytes(const Weight& w, int tile, std::vector<char>& memory) {
    const char* at = w.data + tile * tile_bytes(w);
    if (w.kind < INT4) return at;
    const int64_t size = int64_t(w.channels) / 4 * LINE;
    char *bytes = lines<char>(memory, size), *to = bytes;
    while (to < bytes + size) {
        Bytes low[2][WIDE], high[2][WIDE];
        if (w.kind == INT4) load_nibbles(at, low[0], high[0]), at += LINE;
        else load_sixes<0>(at, low[0], high[0]), load_sixes<1>(at, low[1], high[1]), at += 3 * LINE;
        for (int half = 0; half < (w.kind == INT4 ? 1 : 2); ++half, to += 2 * LINE)
            each<WIDE>(
                [&](auto n) { store(to + n * VECTOR, low[half][n]), store(to + LINE + n * VECTOR, high[half][n]); });
    }
    return bytes;
}

// The scaled sums of a group's codes, which are added to those of the groups before.
template <class SCALES>
void add_part(
    const Weight& w, const Rows& rows, int tile, int token, int tokens, int64_t group, Ints* part, Floats* to) {
    const int64_t groups = w.channels / w.group;
    const auto add = [&](auto count, int m) {
        constexpr int M = count;
        for (int i = 0; i < M; ++i)
            each<WIDE>(
                [&](auto n) { part[(m + i) * WIDE + n] -= w.offset * rows.sum[(token + m + i) * groups + group]; });
        add_group<SCALES, M>(w, rows.scale + (token + m) * groups, tile, group, *(Ints(*)[M][WIDE])(part + m * WIDE),
            *(Sums<M>*)(to + m * WIDE));
    };
    int m = 0;
    for (; m + 4 <= tokens; m += 4) add(std::integral_constant<int, 4>{}, m);
    for (; m < tokens; ++m) add(std::integral_constant<int, 1>{}, m);
}

// `multiply` above for the tokens from `first`, a multiple of 16, to `end`; `at`: by `tile_of_bytes`. `next`: bytes
// from this tile to the one that is probably multiplied after it, or 0. after(token, tokens): when all of some tokens
// is added up.
template <class SCALES, class After>
void multiply_tiles(amx::Tiles& tiles, const Weight& w, const Rows& rows, const char* at, int tile, int first, int end,
    int64_t next, Floats* to, const After& after) {
    const bool is_bf16 = w.kind == BFLOAT16;
    const int words = tile_words(w, amx::MANY), steps = int(rows.row_bytes / (4 * words));
    const int group = is_bf16 ? steps : w.group / 4 / words;  // steps of it
    // sums stay in tile registers from the first channel to the last
    const bool is_whole = group == steps;
    const int some = end - first <= amx::TOKENS ? steps
                     : is_whole                 ? amx::STEPS
                                                : (amx::STEPS < group ? 1 : amx::STEPS / group) * group;
    const int64_t second = amx::ROWS * rows.row_bytes;
    for (int s = 0; s < steps; s += some) {
        const int until = s + some < steps ? s + some : steps;
        for (int token = first, m; token < end; token += m) {
            m = end - token < amx::TOKENS ? end - token : amx::TOKENS;
            tiles.configure(m, words);
            const amx::Fetch fetch =
                token == first ? amx::Fetch{AHEAD, true} : amx::Fetch{token == first + amx::TOKENS ? next : 0, false};
            Floats* sums = to + (token - first) * WIDE;
            const auto product = [&](int from, int past, bool more, void* into) {
                const char *x = rows.data + token * rows.row_bytes + from * amx::ROWS * words * 4,
                           *w_at = at + int64_t(from) * words * LINE;
                if (is_bf16)
                    tiles.multiply<true>(x, second, w_at, past - from, more, fetch, into);
                else
                    tiles.multiply<false>(x, second, w_at, past - from, more, fetch, into);
            };
            if (is_whole) product(s, until, s > 0, sums);
            else if (s == 0) std::memset(sums, 0, m * WIDE * sizeof(Floats));
            for (int from = s; from < until && !is_bf16; from += group) {
                Ints part[amx::TOKENS * WIDE];
                if (!is_whole) product(from, from + group, false, part);
                else if (until < steps) break;
                else
                    std::memcpy(part, sums, m * WIDE * sizeof(Floats)), std::memset(sums, 0, m * WIDE * sizeof(Floats));
                add_part<SCALES>(w, rows, tile, token, m, from / group, part, sums);
            }
            if (until < steps) continue;
            for (int i = 0; i < m && !is_bf16; ++i) {
                subtract_zeros<1>(w, rows, tile, token + i, *(Sums<1>*)(sums + i * WIDE));
                if (std::is_void_v<SCALES>)
                    each<WIDE>([&](auto n) {
                        sums[i * WIDE + n] *= load_lanes((const float*)w.scale + tile * TILE_ROWS + n * LANES);
                    });
            }
            after(token, m);
        }
    }
}
#endif

// How many of the tokens left are multiplied at once.
inline int tokens_at_once(Kind kind, int left) {
    const int most = tall(kind);
    // none alone at the end
    if (kind <= BFLOAT16) return left <= most ? left : left < most + 3 ? (left + 1) / 2 : most;
    return left >= most ? most : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

template <class T> struct Output {
    T* data;
    int64_t stride;
    const T* bias;
    Then then;
};

inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// Writes the products of some tokens and a tile; `up`: what their SiLU is multiplied by.
template <class T>
void finish(
    const Weight& w, const Output<T>& out, int tile, int token, int tokens, const Floats* acc, const Floats* up) {
    const int half = w.rows / 2, width = out.then == SWIGLU ? half : w.rows;
    if (!out.bias && (tile + 1) * TILE_ROWS <= width) {  // the usual case, and nothing more to ask for
        for (int m = 0; m < tokens; ++m) {
            T* to = out.data + (token + m) * out.stride + tile * TILE_ROWS;
            each<WIDE>([&](auto n) {
                Floats value = acc[m * WIDE + n];
                if (out.then == ADD) value += load_lanes(to + n * LANES);
                if (out.then == SWIGLU) value = silu(value) * up[m * WIDE + n];
                store_lanes(to + n * LANES, value);
            });
        }
        return;
    }
    for (int m = 0; m < tokens; ++m)
        for (int n = 0; n < WIDE; ++n) {
            const int row = tile * TILE_ROWS + n * LANES, left = width - row;
            if (left <= 0) break;
            T* to = out.data + (token + m) * out.stride + row;
            Floats value = acc[m * WIDE + n];
            if (out.bias) value += load_up_to(out.bias + row, left);
            if (out.then == ADD) value += load_up_to(to, left);
            if (out.then == SWIGLU) {
                Floats by = up[m * WIDE + n];
                if (out.bias) by += load_up_to(out.bias + half + row, left);
                value = silu(value) * by;
            }
            store_up_to(to, value, left);
        }
}

// `finish` shall find the lines that it writes.
template <class T> void ask_for_outputs(const Output<T>& out, int tile, int token, int tokens) {
    for (int m = 0; m < tokens; ++m)
        for (int i = 0; i < TILE_ROWS; i += 64 / int(sizeof(T)))
            __builtin_prefetch(out.data + (token + m) * out.stride + tile * TILE_ROWS + i, 1);
}

// Tokens from `first` to `end` of a tile, which stays in the core's cache meanwhile. The first tokens wait for the
// memory; then it brings `next`, the tile that this thread will probably read after this one.
template <class T>
void some_tokens(const Weight& w, const Rows& rows, const Output<T>& out, int tile, int next, int first, int end) {
    Floats acc[TALL * WIDE], up[TALL * WIDE];
    for (int token = first, m; token < end; token += m) {
        m = tokens_at_once(w.kind, end - token);
        const Multiply multiply = multiply_for(w, m);
        const int64_t ahead = token == first ? AHEAD : token - first <= ASKING ? (next - tile) * tile_bytes(w) : 0;
        ask_for_outputs(out, tile, token, m);
        multiply(w, rows, tile, token, ahead, acc);
        if (out.then == SWIGLU) multiply(w, rows, tile + w.rows / 2 / TILE_ROWS, token, ahead, up);
        finish(w, out, tile, token, m, acc, up);
    }
}

#ifdef QUIRE_AMX
// `some_tokens` where `tile_words` says so.
template <class SCALES, class T>
void some_tokens_by_amx(amx::Tiles& tiles, const Weight& w, const Rows& rows, const Output<T>& out, int tile, int next,
    int first, int end) {
    thread_local std::vector<char> bytes, sums;
    const int64_t ahead = w.kind < INT4 ? (next - tile) * tile_bytes(w) : 0;
    Floats *acc = lines<Floats>(sums, (end - first) * 2 * WIDE), *up = acc + (end - first) * WIDE;
    if (out.then == SWIGLU) {
        const int other = tile + w.rows / 2 / TILE_ROWS;
        multiply_tiles<SCALES>(
            tiles, w, rows, tile_of_bytes(w, other, bytes), other, first, end, ahead, up, [](int, int) {});
    }
    const auto after = [&](int token, int tokens) {
        finish(w, out, tile, token, tokens, acc + (token - first) * WIDE, up + (token - first) * WIDE);
    };
    multiply_tiles<SCALES>(tiles, w, rows, tile_of_bytes(w, tile, bytes), tile, first, end, ahead, acc, after);
}
template <class T> auto some_tokens_by_amx_for(const Weight& w) {
    return w.scale_steps   ? some_tokens_by_amx<Steps, T>
           : w.short_scale ? some_tokens_by_amx<bf16, T>
           : w.grouped     ? some_tokens_by_amx<float, T>
                           : some_tokens_by_amx<void, T>;
}
#endif

// Tokens of a block of `bytes`, a multiple of `some`; all blocks have about one size.
int tokens_of_block(int tokens, int64_t row_bytes, int64_t bytes, int some, int least) {
    const int64_t blocks = (tokens * row_bytes + bytes - 1) / bytes, block = (tokens + blocks - 1) / blocks;
    return int(block < least ? least : (block + some - 1) / some * some);
}

// Codes of `n` values from -127 to 127, their scale and their sum. What is not finite makes the scale NaN.
void quantize(const float* x, int n, int8_t* codes, float* scale, int32_t* sum) {
    uint32_t bits = 0;
    for (int i = 0; i < n; ++i) {
        uint32_t magnitude = load<uint32_t>(x + i) & 0x7fffffff;
        bits = magnitude > bits ? magnitude : bits;
    }
    float most;
    std::memcpy(&most, &bits, 4);
    if (bits >= 0x7f800000) most = NAN;
    *scale = most / 127;
    const float inverse = most > 0 ? 127 / most : 0;
    int32_t total = 0;
    for (int i = 0; i < n; ++i) {
        float scaled = x[i] * inverse + 12582912.0f;  // rounds to the nearest even, in the low bits
        int32_t code = load<int32_t>(&scaled) - 0x4b400000;
        codes[i] = int8_t(code);
        total += codes[i];
    }
    *sum = bits >= 0x7f800000 ? 0 : total;
}

struct Scratch {
    std::vector<char> data;
    std::vector<float> scale;
    std::vector<int32_t> sum;
};

// x [tokens, channels] and out, bias, residual: bfloat16 where `is_bf16`, else float32; norm: float32 where
// `wide_norm`.
struct Product {
    const Weight* weight;
    const void *x, *norm, *bias;
    void* out;
    int64_t x_stride, out_stride;  // elements from a token to the next
    int32_t channels, tokens;
    Then then;
    float eps;
    int32_t is_bf16, wide_norm;
};

// words: of a tile register's row, if AMX computes; else 0.
template <class T, class W> Rows prepare(const Product& p, int words, Scratch& scratch) {
    const Weight& w = *p.weight;
    if (w.kind == FLOAT32 && !p.norm && sizeof(T) == 4) return {(const char*)p.x, p.x_stride * 4, nullptr, nullptr};
    const bool widened = w.kind == BFLOAT16 && !DOTS_BF16;
    const int64_t size = w.kind == FLOAT32 || widened ? 4 : w.kind == BFLOAT16 ? 2 : 1;
    const int64_t groups = w.kind >= INT8 ? w.channels / w.group : 0;
    const int64_t tokens = p.tokens;  // so that sizes are counted in 64 bits
    scratch.data.resize((tokens + 15) * w.channels * size + 128);
    scratch.scale.resize(tokens * groups);
    scratch.sum.resize(tokens * groups);
    char* data = scratch.data.data() + (-(uintptr_t)scratch.data.data() & 63);
    float* scale = scratch.scale.data();
    int32_t* sums = scratch.sum.data();
    constexpr int PIECE = 4;
    pool.run((p.tokens + PIECE - 1) / PIECE, [&](int64_t piece) {
        std::vector<float> wide(w.channels + LANES);
        std::vector<char> row(words ? w.channels * size : 0);
        for (int64_t t = piece * PIECE; t < p.tokens && t < (piece + 1) * PIECE; ++t) {
            read_row((const T*)p.x + t * p.x_stride, p.channels, (const W*)p.norm, p.eps, wide.data());
            char* to = words ? row.data() : data + t * w.channels * size;
            if (w.kind == FLOAT32) std::memcpy(to, wide.data(), w.channels * 4);
            else if (widened)
                for (int i = 0; i < w.channels; i += LANES)
                    store_up_to((float*)to + i, to_bf16_and_back(load_lanes(&wide[i])), w.channels - i);
            else if (w.kind == BFLOAT16)
                for (int i = 0; i < w.channels; i += LANES)
                    store_up_to((bf16*)to + i, load_lanes(&wide[i]), w.channels - i);
            else
                for (int64_t g = 0, i = t * groups; g < groups; ++g, ++i)
                    quantize(&wide[g * w.group], w.group, (int8_t*)to + g * w.group, scale + i, sums + i);
            if (words) {
                const int64_t some = 4 * words;
                char* at = data + t / 16 * 16 * w.channels * size + t % 16 * some;
                for (int64_t i = 0; i < w.channels * size; i += some, at += 16 * some) std::memcpy(at, to + i, some);
            }
        }
    });
    return {data, w.channels * size, scale, sums};
}

template <class T, class W> void product(const Product& p) {
    thread_local Scratch scratch;
    const Weight& w = *p.weight;
#ifdef QUIRE_AMX
    const int words = tile_words(w, p.tokens);
#else
    const int words = 0;
#endif
    const Rows rows = prepare<T, W>(p, words, scratch);
    const Output<T> out{(T*)p.out, p.out_stride, (const T*)p.bias, p.then};
    const int tiles = ((p.then == SWIGLU ? w.rows / 2 : w.rows) + TILE_ROWS - 1) / TILE_ROWS;
    const int piece = tile_bytes(w) < PIECE_BYTES ? PIECE_BYTES / tile_bytes(w) : 1,
              pieces = (tiles + piece - 1) / piece;
    const int block = words ? tokens_of_block(p.tokens, rows.row_bytes, X_BYTES_AMX, 32, 64)
                            : tokens_of_block(p.tokens, rows.row_bytes, X_BYTES, TALL, LEAST);
    pool.run(int64_t(pieces) * ((p.tokens + block - 1) / block), [&](int64_t i) {
        const int begin = int(i % pieces) * piece, end = begin + piece < tiles ? begin + piece : tiles;
        const int first = int(i / pieces) * block, last = first + block < p.tokens ? first + block : p.tokens;
#ifdef QUIRE_AMX
        amx::Tiles registers;
#endif
        for (int tile = begin; tile < end; ++tile) {
            const int next = tile + 1 < end ? tile + 1 : end + (pool.threads - 1) * piece;
#ifdef QUIRE_AMX
            if (words) some_tokens_by_amx_for<T>(w)(registers, w, rows, out, tile, next, first, last);
            else
#endif
                some_tokens(w, rows, out, tile, next, first, last);
        }
    });
}

}  // namespace

struct Layout {
    int32_t lanes, tile_rows, byte_offset, bf16_channels;
};

extern "C" void quire_layout(Layout* layout) { *layout = {LANES, TILE_ROWS, BYTE_OFFSET, BF16_CHANNELS}; }

extern "C" void quire_product(const Product* p) {
    if (p->tokens == 0) return;
    if (!p->is_bf16) product<float, float>(*p);
    else if (p->wide_norm) product<bf16, float>(*p);
    else product<bf16, bf16>(*p);
}
