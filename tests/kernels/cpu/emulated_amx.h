// AMX in software, included before all else by tests on CPUs without it.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};
struct Tile {
    alignas(64) uint8_t row[16][64];
};
inline thread_local Config config{};
inline thread_local Tile tiles[8];

inline void load_config(const void* from) {
    std::memcpy(&config, from, sizeof config);
    if (config.palette != 1) std::abort();
    for (int t = 0; t < 16; ++t)
        if (config.bytes[t] > 64 || config.rows[t] > 16 || (t >= 8 && config.rows[t])) std::abort();
    std::memset(tiles, 0, sizeof tiles);
}
inline void release() { config = {}; }
inline void check(int t) {
    if (!config.rows[t] || !config.bytes[t]) std::abort();
}
inline void zero(int t) { check(t), std::memset(&tiles[t], 0, sizeof tiles[t]); }
inline void load(int t, const void* from, int64_t stride) {
    zero(t);
    for (int i = 0; i < config.rows[t]; ++i)
        std::memcpy(tiles[t].row[i], (const char*)from + i * stride, config.bytes[t]);
}
inline void store(int t, void* to, int64_t stride) {
    check(t);
    for (int i = 0; i < config.rows[t]; ++i) std::memcpy((char*)to + i * stride, tiles[t].row[i], config.bytes[t]);
}

// to[m][n] += the sum over k of a[m][k] · b[k][n], each of several elements.
template <class Sum, class A, class B> void dot(int to, int a, int b) {
    check(to), check(a), check(b);
    if (config.bytes[a] != 4 * config.rows[b] || config.rows[to] != config.rows[a] ||
        config.bytes[to] != config.bytes[b])
        std::abort();
    constexpr int EACH = 4 / sizeof(A);
    const auto wide = [](auto x) {
        if constexpr (sizeof x == 1) return int32_t(x);
        else {
            const uint32_t bits = uint32_t(x) << 16;
            float f;
            std::memcpy(&f, &bits, 4);
            return f;
        }
    };
    for (int m = 0; m < config.rows[to]; ++m)
        for (int n = 0; n < config.bytes[to] / 4; ++n) {
            Sum part[EACH] = {}, total;
            for (int k = 0; k < config.rows[b]; ++k)
                for (int i = 0; i < EACH; ++i)
                    part[i] += wide(((const A*)tiles[a].row[m])[k * EACH + i]) *
                               wide(((const B*)tiles[b].row[k])[n * EACH + i]);
            std::memcpy(&total, &tiles[to].row[m][n * 4], 4);
            for (Sum p : part) total += p;
            std::memcpy(&tiles[to].row[m][n * 4], &total, 4);
        }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_zero emulated::zero
#define _tile_dpbf16ps emulated::dot<float, uint16_t, uint16_t>
#define _tile_dpbsud emulated::dot<int32_t, int8_t, uint8_t>
#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield  // the system need not be asked
