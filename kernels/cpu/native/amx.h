// Products by AMX. A tile register holds up to 16 rows of 64 bytes; one instruction multiplies 16 tokens and 16 rows of
// W, 32 channels of bfloat16 or 64 of eight bits at once: a step. W lies in memory as for AVX-512: a tile register
// takes the same vector of 16 lines, one below the other. Tokens lie as tile registers take them, 16 by 16, a step's
// rows behind each other: rows as far apart as a token's channels would be in few sets of the first cache.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "isa.h"

namespace amx {

constexpr int ROWS = 16;    // of a tile register
constexpr int TOKENS = 32;  // that are multiplied at once, by two tile registers
// that are multiplied with all tokens before the next ones: as much of W as the first cache holds
constexpr int STEPS = 8;
constexpr int MANY = 64;    // tokens of which products by tile registers are the faster for every kind of weights

// Linux lets a process use tile registers once it has asked for them.
inline bool permitted() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    static const bool is_permitted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return is_permitted;
}

// What is asked for while W is read: what lies so many bytes behind, at once or for later.
struct Fetch {
    int64_t ahead = 0;
    bool is_near = false;
    void lines(const char* w, int bytes, int apart) const {
        if (is_near) for (int i = 0; i < bytes; i += apart) __builtin_prefetch(w + ahead + i);
        else if (ahead) for (int i = 0; i < bytes; i += apart) __builtin_prefetch(w + ahead + i, 0, 2);
    }
};

// The tile registers of this thread, for as long as this lives: sums in 0 to 3, tokens in 4 and 5, W in 6 and 7.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() {
        if (tokens_) _tile_release();
    }

    // For at most TOKENS tokens, and rows of W of so many words of 32 bits.
    void configure(int tokens, int words) {
        if (tokens == tokens_ && words == words_) return;
        tokens_ = tokens, words_ = words;
        const int first = tokens < 16 ? tokens : 16, second = tokens > 16 ? tokens - 16 : first;
        Config config;
        for (int i = 0; i < 4; ++i) config.of(i, tokens > 16 && i >= 2 ? second : first, 16);
        config.of(4, first, words), config.of(5, second, words);
        config.of(6, words, 16), config.of(7, words, 16);
        __asm__ volatile("" ::"r"(&config) : "memory");  // it is read as a whole
        _tile_loadconfig(&config);
    }

    // Products of `steps` steps of tokens and rows of W, in lines: to lines of four vectors, one for each token, of
    // floats if BF16 and else of integers; added to these if `more`. `second`: bytes from a token to the one 16 further
    // on.
    template <bool BF16>
    void multiply(const char* x, int64_t second, const char* w, int steps, bool more, Fetch fetch, void* to) const {
        __asm__ volatile("" ::: "memory");  // what was written before is read here
        if (tokens_ <= ROWS) one<BF16>(x, w, steps, more, fetch, (char*)to);
        else
            for (int n = 0; n < 2; ++n) two<BF16>(x, second, w + n * 128, steps, more, fetch, (char*)to + n * 128);
        __asm__ volatile("" ::: "memory");
    }

  private:
    static_assert(WIDE == 4 && VECTOR == 64);
    static constexpr int LINE = WIDE * VECTOR;

    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};  // of a row
        uint8_t rows[16] = {};
        void of(int tile, int rows, int words) { this->rows[tile] = uint8_t(rows), bytes[tile] = uint16_t(4 * words); }
    };

    template <bool BF16> void one(const char* x, const char* w, int steps, bool more, Fetch fetch, char* to) const {
        const int64_t row = words_ * 4;
        if (!more) zero();
        else {
            _tile_loadd(0, to, LINE);
            _tile_loadd(1, to + VECTOR, LINE);
            _tile_loadd(2, to + 2 * VECTOR, LINE);
            _tile_loadd(3, to + 3 * VECTOR, LINE);
        }
        for (int s = 0; s < steps; ++s, x += ROWS * row, w += words_ * LINE) {
            fetch.lines(w, words_ * LINE, 64);
            _tile_loadd(4, x, row);
            _tile_loadd(6, w, LINE);
            _tile_loadd(7, w + VECTOR, LINE);
            dot<BF16, 0>();
            _tile_loadd(6, w + 2 * VECTOR, LINE);
            _tile_loadd(7, w + 3 * VECTOR, LINE);
            dot<BF16, 2>();
        }
        _tile_stored(0, to, LINE);
        _tile_stored(1, to + VECTOR, LINE);
        _tile_stored(2, to + 2 * VECTOR, LINE);
        _tile_stored(3, to + 3 * VECTOR, LINE);
    }

    // Half of each line.
    template <bool BF16>
    void two(const char* x, int64_t second, const char* w, int steps, bool more, Fetch fetch, char* to) const {
        const int64_t row = words_ * 4;
        if (!more) zero();
        else {
            _tile_loadd(0, to, LINE);
            _tile_loadd(1, to + VECTOR, LINE);
            _tile_loadd(2, to + ROWS * LINE, LINE);
            _tile_loadd(3, to + ROWS * LINE + VECTOR, LINE);
        }
        for (int s = 0; s < steps; ++s, x += ROWS * row, w += words_ * LINE) {
            fetch.lines(w, words_ * LINE, LINE), fetch.lines(w + 64, words_ * LINE, LINE);
            _tile_loadd(4, x, row);
            _tile_loadd(6, w, LINE);
            _tile_loadd(7, w + VECTOR, LINE);
            _tile_loadd(5, x + second, row);
            dot<BF16, 0>();
            dot<BF16, 2, true>();
        }
        _tile_stored(0, to, LINE);
        _tile_stored(1, to + VECTOR, LINE);
        _tile_stored(2, to + ROWS * LINE, LINE);
        _tile_stored(3, to + ROWS * LINE + VECTOR, LINE);
    }

    static void zero() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    // Into the sums SUM and SUM + 1, of the first or the second tokens. Tokens are signed, codes of W are not.
    template <bool BF16, int SUM, bool SECOND = false> static void dot() {
        static_assert(SUM == 2 || (SUM == 0 && !SECOND));
        if constexpr (BF16 && SUM == 0) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        } else if constexpr (BF16 && SECOND) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else if constexpr (BF16) {
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 4, 7);
        } else if constexpr (SUM == 0) {
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
        } else if constexpr (SECOND) {
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        } else {
            _tile_dpbsud(2, 4, 6);
            _tile_dpbsud(3, 4, 7);
        }
    }

    int tokens_ = 0, words_ = 0;
};

}  // namespace amx
