// Products by AMX. A tile register holds up to 16 rows of 64 bytes; one instruction multiplies 16 tokens and 16 rows of W, 32
// channels of bfloat16 or 64 of eight bits at once. W lies in memory as for AVX-512: a tile register takes the same vector of 16
// lines, one below the other.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "isa.h"

namespace amx {

constexpr int TOKENS = 32;  // that are multiplied at once, by two tile registers
constexpr int MANY = 64;    // tokens of which products by tile registers are the faster for every kind of weights

// Linux lets a process use tile registers once it has asked for them.
inline bool permitted() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    static const bool is_permitted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return is_permitted;
}

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

    // Products of `steps` times as many words of tokens, `stride` bytes apart, and of rows of W, in lines: to lines of four vectors,
    // one for each token, of floats if BF16 and else of integers. What lies `ahead` bytes behind W is asked for meanwhile.
    template <bool BF16> void multiply(const char* x, int64_t stride, const char* w, int steps, int64_t ahead, void* to) const {
        __asm__ volatile("" ::: "memory");  // what was written before is read here
        if (tokens_ <= 16) one<BF16>(x, stride, w, steps, ahead, (char*)to);
        else
            for (int n = 0; n < 2; ++n) two<BF16>(x, stride, w + n * 128, steps, ahead, (char*)to + n * 128);
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

    template <bool BF16> void one(const char* x, int64_t stride, const char* w, int steps, int64_t ahead, char* to) const {
        zero();
        for (int s = 0; s < steps; ++s, x += words_ * 4, w += words_ * LINE) {
            for (int i = 0; i < words_ * LINE; i += 64) __builtin_prefetch(w + ahead + i);
            _tile_loadd(4, x, stride);
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
    template <bool BF16> void two(const char* x, int64_t stride, const char* w, int steps, int64_t ahead, char* to) const {
        zero();
        for (int s = 0; s < steps; ++s, x += words_ * 4, w += words_ * LINE) {
            for (int i = 0; i < words_ * LINE; i += LINE) __builtin_prefetch(w + ahead + i), __builtin_prefetch(w + ahead + i + 64);
            _tile_loadd(4, x, stride);
            _tile_loadd(6, w, LINE);
            _tile_loadd(7, w + VECTOR, LINE);
            _tile_loadd(5, x + 16 * stride, stride);
            dot<BF16, 0>();
            dot<BF16, 2, true>();
        }
        _tile_stored(0, to, LINE);
        _tile_stored(1, to + VECTOR, LINE);
        _tile_stored(2, to + 16 * LINE, LINE);
        _tile_stored(3, to + 16 * LINE + VECTOR, LINE);
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
