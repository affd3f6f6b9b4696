// Products of every weight format beside float64: for instruction sets that run under an emulator.
#include "products.cpp"

#include <cstdio>
#include <cstdlib>

namespace {

constexpr int ROWS = 2 * TILE_ROWS + 5, GROUP = 32, TILES = 3;
constexpr int OFFSET[] = {0, 0, BYTE_OFFSET, 8, 32};

// Bytes of weights in the order of products, from `code(row, channel)`.
template <class Code> std::vector<uint8_t> packed(Kind kind, int channels, const Code& code) {
    std::vector<uint8_t> data(size_t(TILES) * TILE_ROWS * channels * 4 + AHEAD);
    const int step = kind == BFLOAT16 ? BF16_CHANNELS : 1 << kind;
    const auto unit = [&](int row, int k, int line) -> uint8_t& {  // INT6: three lines hold sixteen channels
        const size_t lines = size_t(row / TILE_ROWS) * (channels / 16) * 3 + k / 16 * 3 + line;
        return data[(lines * TILE_ROWS + row % TILE_ROWS) * 4 + k % 4];
    };
    for (int row = 0; row < ROWS; ++row)
        for (int k = 0; k < channels; ++k) {
            const size_t word = (size_t(row / TILE_ROWS) * (channels / step) + k / step) * TILE_ROWS + row % TILE_ROWS;
            const double value = code(row, k);
            if (kind == FLOAT32) *(float*)&data[word * 4] = float(value);
            else if (kind == BFLOAT16) store_some((bf16*)&data[(word * step + k % step) * 2], all(float(value)), 1);
            else if (kind == INT8) data[word * 4 + k % 4] = uint8_t(int(value) + BYTE_OFFSET);
            else if (kind == INT4) data[word * 4 + k % 4] |= (int(value) + 8) << (k % 8 / 4 * 4);
            else {
                const int stored = int(value) + 32;
                unit(row, k, k % 16 / 8) |= (stored & 15) << (k % 8 / 4 * 4);
                unit(row, k, 2) |= (stored >> 4) << (k % 16 / 4 * 2);
            }
        }
    return data;
}

int check(Kind kind, int tokens, int channels) {
    const bool low_bit = kind >= INT8;
    const auto code = [&](int row, int k) {
        const int limit = kind == INT4 ? 8 : kind == INT6 ? 32 : 128;
        const int mixed = (row * 31 + k * 17 + row * k) % (2 * limit) - limit;
        return low_bit ? double(mixed) : mixed / 64.0;
    };
    // input: its own codes
    const auto input = [&](int t, int k) { return k % GROUP ? double((t * 13 + k * 7) % 255 - 127) : 127.0; };
    const std::vector<uint8_t> data = packed(kind, channels, code);
    std::vector<float> x(tokens * channels), out(tokens * ROWS), scale(TILES * TILE_ROWS * (channels / GROUP));
    std::vector<int8_t> steps(scale.size());  // of INT6: each group is a span of its own
    for (size_t i = 0; i < scale.size(); ++i) {
        steps[i] = int8_t(i % 7 + 1);
        scale[i] = float(kind == INT6 ? i % 3 + 1 : steps[i]) / 8;
    }
    for (int t = 0; t < tokens; ++t)
        for (int k = 0; k < channels; ++k) x[t * channels + k] = float(input(t, k));
    const Weight weight{kind, ROWS, channels, GROUP, (const char*)data.data(), scale.data(), nullptr, nullptr,
                        kind == INT6 ? steps.data() : nullptr, nullptr, low_bit, 0, OFFSET[kind]};
    Product product{&weight, x.data(), nullptr, nullptr, out.data(), channels, ROWS, channels, tokens, STORE, 0, 0, 0};
    quire_product(&product);
    int faults = 0;
    for (int t = 0; t < tokens; ++t)
        for (int row = 0; row < ROWS; ++row) {
            double want = 0, size = 0;
            for (int k = 0; k < channels; ++k) {
                const int group = (row / TILE_ROWS * (channels / GROUP) + k / GROUP) * TILE_ROWS + row % TILE_ROWS;
                const double term =
                    code(row, k) * input(t, k) * (low_bit ? scale[group] : 1) * (kind == INT6 ? steps[group] : 1);
                want += term, size += std::abs(term);
            }
            const double error = std::abs(out[t * ROWS + row] - want);
            faults += !(error <= 1e-5 * size);
        }
    if (faults)
        std::printf(
            "kind %d, %d tokens, %d channels: %d of %d are wrong\n", kind, tokens, channels, faults, tokens * ROWS);
    return faults;
}

}  // namespace

int main() {
    int faults = 0;
    for (Kind kind : {FLOAT32, BFLOAT16, INT8, INT4, INT6})
        for (int tokens : {1, 2, 4, 5, 6, 13, 39, 77})
            for (int channels : {128, kind < INT8 ? 70 : 64}) faults += check(kind, tokens, channels);
    Floats v;
    for (int i = 0; i < LANES; ++i) v[i] = float(i) - 2;
    faults += std::abs(sum(exp(v)) - [&] {
        double e = 0;
        for (int i = 0; i < LANES; ++i) e += std::exp(i - 2.0);
        return e;
    }()) > 1e-3 * sum(exp(v));
    faults += largest(v) != LANES - 3;
    return faults != 0;
}
