// Recurrent layers whose heads have a matrix as state, over states in blocks:
// kernels.reference.{delta_rule,mamba2,kda}. A sum has the same order whatever the number of tokens in a step, so a
// token's bytes do not depend on it.
#include "pool.h"
#include "simd.h"

#include <algorithm>
#include <vector>

struct Scan {
    // x [tokens, x_stride]: queries, keys and values; strength and step as `gates`, of each token
    const void *x, *strength, *step;
    const float *rate, *bias, *skip;
    void *before, *keys;  // [blocks, heads, key_dim, value_dim]; [blocks, block_size, key_heads, key_dim]
    float *updates, *decays;
    void* out;  // [tokens, heads, value_dim]
    const int32_t *tables, *rows, *query_start, *context_lens;
    int64_t seqs, tokens, x_stride, strength_stride, step_stride, query_at, keys_at, values_at;
    int64_t num_rows, max_blocks, block_size, key_heads, heads, key_dim, value_dim;
    float low, high;  // of step sizes
    int32_t kind, is_bf16, rounds_states;
};

namespace {

enum Kind { DELTA, STATE_SPACE, CHANNELS };  // delta_rule, mamba2, kda

constexpr int64_t whole(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// log(1 + e^x), relative error below 3e-7: log(1 + u) = 2 artanh(u / (2 + u)).
inline Floats softplus(Floats x) {
    const Floats u = exp(x < 0.0f ? x : -x), z = u / (2.0f + u), s = z * z;
    Floats p = all(1.0f / 15);
    for (float c : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) p = p * s + c;
    return (x > 0.0f ? x : all(0.0f)) + 2.0f * z * p;
}

inline float dot(const float* a, const float* b, int64_t n) {  // n: whole vectors
    Floats total{};
    for (int64_t i = 0; i < n; i += LANES) total += load_lanes(a + i) * load_lanes(b + i);
    return sum(total);
}

template <class T> void read(const T* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += LANES)
        store_lanes(to + i, load_up_to(from + i, int(std::min<int64_t>(n - i, LANES))));
}
template <class T> void write(const float* from, int64_t n, T* to) {
    for (int64_t i = 0; i < n; i += LANES)
        store_up_to(to + i, load_lanes(from + i), int(std::min<int64_t>(n - i, LANES)));
}

// to[r, :] = left[r, :] · right, after from[r, :] · scale[r] where `from` is not null. Columns: whole vectors.
struct Multiply {
    const float *left, *right, *from, *scale;
    float* to;
    int64_t rows, left_stride, inner, columns;

    template <int R, int W> void tile(int64_t row, int64_t column) const {
        Floats acc[R][W] = {};
        if (from)
            for (int r = 0; r < R; ++r)
                for (int w = 0; w < W; ++w)
                    acc[r][w] = load_lanes(from + (row + r) * columns + column + w * LANES) * scale[row + r];
        for (int64_t i = 0; i < inner; ++i) {
            Floats b[W];
            each<W>([&](auto w) { b[w] = load_lanes(right + i * columns + column + w * LANES); });
            each<R>([&](auto r) {
                const Floats a = all(left[(row + r) * left_stride + i]);
                each<W>([&](auto w) { acc[r][w] += a * b[w]; });
            });
        }
        for (int r = 0; r < R; ++r)
            for (int w = 0; w < W; ++w) store_lanes(to + (row + r) * columns + column + w * LANES, acc[r][w]);
    }
    template <int R> int64_t across(int64_t row, int64_t column) const {
        constexpr int W = R <= 2 ? 2 * WIDE : WIDE;
        if (column + W * LANES <= columns) return tile<R, W>(row, column), W * LANES;
        return tile<R, 1>(row, column), LANES;
    }
    template <int R> void rest(int64_t row, int64_t count) const {
        if (count == R)
            for (int64_t column = 0; column < columns;) column += across<R>(row, column);
        else if constexpr (R > 1)
            rest<R - 1>(row, count);
    }
    void run() const {
        for (int64_t row = 0; row < rows; row += TALL) rest<TALL>(row, std::min<int64_t>(rows - row, TALL));
    }
};

// A head of a sequence.
template <Kind KIND, class T> class Head {
  public:
    Head(const Scan& a, int64_t seq, int64_t head)
        : a_(a), head_(head), key_head_(head / (a.heads / a.key_heads)), token_(a.query_start[seq]),
          end_(a.context_lens[seq]), begin_(end_ - (a.query_start[seq + 1] - token_)),
          table_(a.tables + a.rows[seq] * a.max_blocks), keys_width_(whole(a.key_dim)),
          values_width_(whole(a.value_dim)) {
        const int64_t size = whole(a.block_size), channels = KIND == CHANNELS ? keys_width_ : 1;
        thread_local std::vector<float> memory;
        const int64_t sizes[] = {a.key_dim * values_width_, size * keys_width_, size * keys_width_,
            2 * size * keys_width_, 2 * size * values_width_, size * values_width_, size * channels, a.key_dim * size,
            2 * size, keys_width_};
        float** parts[] = {
            &own_, &keys_, &queries_, &left_, &products_, &updates_, &decays_, &weights_, &pairs_, &scale_};
        int64_t total = 0;
        for (int64_t each : sizes) total += each;
        if (int64_t(memory.size()) < total) memory.resize(total);
        float* at = memory.data();
        for (int i = 0; i < 10; at += sizes[i++]) *parts[i] = at;
    }

    void run() {
        const int64_t size = a_.block_size;
        if (begin_) {
            const int64_t index = (begin_ - 1) / size, old = begin_ - index * size;
            if (index) load_state(table_[index]);
            load_old(table_[index], old);
            if (old == size) advance(size);
        }
        for (int64_t position = begin_; position < end_;) {
            const int64_t index = position / size, old = position - index * size;
            const int64_t count = std::min(size - old, end_ - position), block = table_[index];
            if (block >= 0 && !old) store_state(block);
            compute(block, old, count);
            token_ += count, position += count;
            if (position < end_) advance(old + count);
        }
    }

  private:
    int64_t state_at(int64_t block) const { return (block * a_.heads + head_) * a_.key_dim * a_.value_dim; }
    int64_t slot_at(int64_t block, int64_t slot) const { return (block * a_.block_size + slot) * a_.heads + head_; }
    T* key_at(int64_t block, int64_t slot) const {
        return (T*)a_.keys + ((block * a_.block_size + slot) * a_.key_heads + key_head_) * a_.key_dim;
    }
    float* decay(int64_t slot) const { return decays_ + (KIND == CHANNELS ? slot * keys_width_ : slot); }

    void load_state(int64_t block) {
        const int64_t width = a_.value_dim;
        state_ = own_;
        if (a_.rounds_states)
            for (int64_t d = 0; d < a_.key_dim; ++d)
                read((const bf16*)a_.before + state_at(block) + d * width, width, own_ + d * values_width_);
        else if (width != values_width_)
            for (int64_t d = 0; d < a_.key_dim; ++d)
                read((const float*)a_.before + state_at(block) + d * width, width, own_ + d * values_width_);
        else
            state_ = (const float*)a_.before + state_at(block);
    }

    void store_state(int64_t block) const {
        const int64_t width = a_.value_dim, total = a_.key_dim * width;
        if (!state_) {
            a_.rounds_states ? std::memset((bf16*)a_.before + state_at(block), 0, total * sizeof(bf16))
                             : std::memset((float*)a_.before + state_at(block), 0, total * sizeof(float));
            return;
        }
        for (int64_t d = 0; d < a_.key_dim; ++d) {
            const float* from = state_ + d * values_width_;
            a_.rounds_states ? write(from, width, (bf16*)a_.before + state_at(block) + d * width)
                             : write(from, width, (float*)a_.before + state_at(block) + d * width);
        }
    }

    // Keys as they are multiplied, with zeros behind.
    void read_key(const T* raw, float* key, float factor) const {
        read(raw, a_.key_dim, key);
        if (KIND == STATE_SPACE) return;
        const Floats scale = all(factor / std::sqrt(dot(key, key, keys_width_) + 1e-6f));
        for (int64_t i = 0; i < keys_width_; i += LANES) store_lanes(key + i, load_lanes(key + i) * scale);
    }

    void load_old(int64_t block, int64_t count) {
        for (int64_t j = 0; j < count; ++j) {
            read_key(key_at(block, j), keys_ + j * keys_width_, 1.0f);
            read(a_.updates + slot_at(block, j) * a_.value_dim, a_.value_dim, updates_ + j * values_width_);
            if (KIND == CHANNELS) read(a_.decays + slot_at(block, j) * a_.key_dim, a_.key_dim, decay(j));
            else *decay(j) = a_.decays[slot_at(block, j)];
        }
    }

    // The state after the first `count` tokens of the block.
    void advance(int64_t count) {
        for (int64_t j = 0; j < count; ++j)
            for (int64_t d = 0; d < a_.key_dim; d += LANES) {
                const Floats since = KIND == CHANNELS ? load_lanes(decay(count - 1) + d) - load_lanes(decay(j) + d)
                                                      : all(*decay(count - 1) - *decay(j));
                const Floats weight = load_lanes(keys_ + j * keys_width_ + d) * exp(since);
                for (int64_t lane = 0; lane < LANES && d + lane < a_.key_dim; ++lane)
                    weights_[(d + lane) * count + j] = weight[lane];
            }
        for (int64_t d = 0; d < a_.key_dim; d += LANES)
            store_lanes(scale_ + d, exp(KIND == CHANNELS ? load_lanes(decay(count - 1) + d) : all(*decay(count - 1))));
        Multiply{weights_, updates_, state_, scale_, own_, a_.key_dim, count, count, values_width_}.run();
        state_ = own_;
    }

    // Keys, queries and decays of `count` tokens after the `old` ones of their block.
    void read_tokens(int64_t block, int64_t old, int64_t count) {
        const float scale = KIND == STATE_SPACE ? 1.0f : 1 / std::sqrt(float(a_.key_dim));
        for (int64_t i = 0; i < count; ++i) {
            const T* x = (const T*)a_.x + (token_ + i) * a_.x_stride + key_head_ * a_.key_dim;
            read_key(x + a_.keys_at, keys_ + (old + i) * keys_width_, 1.0f);
            read_key(x + a_.query_at, queries_ + i * keys_width_, scale);
            if (block >= 0 && head_ % (a_.heads / a_.key_heads) == 0)
                std::memcpy(key_at(block, old + i), x + a_.keys_at, a_.key_dim * sizeof(T));
            const T* step = (const T*)a_.step + (token_ + i) * a_.step_stride;
            float* to = decay(old + i);
            if (KIND == CHANNELS) {
                for (int64_t d = 0; d < a_.key_dim; d += LANES) {
                    const int n = int(std::min<int64_t>(a_.key_dim - d, LANES));
                    const int64_t at = head_ * a_.key_dim + d;
                    const Floats own =
                        softplus(load_up_to(step + at, n) + load_up_to(a_.bias + at, n)) * -a_.rate[head_];
                    store_lanes(to + d, old + i ? load_lanes(decay(old + i - 1) + d) + own : own);
                }
                if (block >= 0) write(to, a_.key_dim, a_.decays + slot_at(block, old + i) * a_.key_dim);
            } else {
                const float own = step_size(step) * -a_.rate[head_];
                *to = old + i ? *decay(old + i - 1) + own : own;
                if (block >= 0) a_.decays[slot_at(block, old + i)] = *to;
            }
        }
    }

    float step_size(const T* step) const {
        const float size = softplus(all(to_float(step[head_]) + a_.bias[head_]))[0];
        return KIND == STATE_SPACE ? std::min(std::max(size, a_.low), a_.high) : size;
    }

    // What the state gives for each new token's key and query, a row each; of state-space layers for the query alone.
    void of_state(int64_t old, int64_t count) {
        constexpr int EACH = KIND == STATE_SPACE ? 1 : 2;
        const int64_t rows = EACH * count;
        if (!state_) return (void)std::fill(products_, products_ + rows * values_width_, 0.0f);
        for (int64_t i = 0; i < count; ++i)
            for (int64_t d = 0; d < keys_width_; d += LANES) {
                const Floats left = KIND == CHANNELS ? exp(load_lanes(decay(old + i) + d)) : all(1.0f);
                float* to = left_ + EACH * i * keys_width_ + d;
                if (EACH == 2) store_lanes(to, load_lanes(keys_ + (old + i) * keys_width_ + d) * left);
                store_lanes(to + (EACH - 1) * keys_width_, load_lanes(queries_ + i * keys_width_ + d) * left);
            }
        Multiply{left_, state_, nullptr, nullptr, products_, rows, keys_width_, a_.key_dim, values_width_}.run();
    }

    // How much of the updates of tokens up to its own a token's key and query find, in `pairs_`.
    void find_pairs(int64_t slot, const float* query) {
        const float* key = keys_ + slot * keys_width_;
        float *similar = pairs_, *seen = pairs_ + whole(a_.block_size);
        for (int64_t j = 0; j <= slot; ++j) {
            const float* other = keys_ + j * keys_width_;
            if (KIND == CHANNELS) {
                Floats first{}, second{};
                for (int64_t d = 0; d < keys_width_; d += LANES) {
                    const Floats left =
                        load_lanes(other + d) * exp(load_lanes(decay(slot) + d) - load_lanes(decay(j) + d));
                    first += load_lanes(key + d) * left, second += load_lanes(query + d) * left;
                }
                similar[j] = sum(first), seen[j] = sum(second);
            } else {
                if (KIND == DELTA) similar[j] = dot(key, other, keys_width_);
                seen[j] = dot(query, other, keys_width_);
            }
        }
        if (KIND == CHANNELS) return;
        for (int64_t j = 0; j <= slot; j += LANES) {
            const Floats left = exp(all(*decay(slot)) - load_lanes(decays_ + j));
            if (KIND == DELTA) store_lanes(similar + j, load_lanes(similar + j) * left);
            store_lanes(seen + j, load_lanes(seen + j) * left);
        }
    }

    void compute(int64_t block, int64_t old, int64_t count) {
        read_tokens(block, old, count);
        of_state(old, count);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t slot = old + i, width = values_width_;
            find_pairs(slot, queries_ + i * keys_width_);
            const float shrunk = KIND == CHANNELS ? 1.0f : exp(all(*decay(slot)))[0];
            const float strength = strength_of(token_ + i), skip = KIND == STATE_SPACE ? a_.skip[head_] : 0.0f;
            const T* values = (const T*)a_.x + (token_ + i) * a_.x_stride + a_.values_at + head_ * a_.value_dim;
            T* out = (T*)a_.out + ((token_ + i) * a_.heads + head_) * a_.value_dim;
            const float *of_key = products_ + 2 * i * width,
                        *of_query = KIND == STATE_SPACE ? products_ + i * width : of_key + width;
            for (int64_t c = 0; c < width; c += LANES) {
                const int n = int(std::min<int64_t>(a_.value_dim - c, LANES));
                const Floats value = load_up_to(values + c, n);
                Floats update = value, result = load_lanes(of_query + c) * shrunk;
                if (KIND != STATE_SPACE) update = value - load_lanes(of_key + c) * shrunk;
                for (int64_t j = 0; j < slot; ++j) {
                    const Floats other = load_lanes(updates_ + j * width + c);
                    if (KIND != STATE_SPACE) update -= other * pairs_[j];
                    result += other * pairs_[whole(a_.block_size) + j];
                }
                update = update * strength;
                result += update * pairs_[whole(a_.block_size) + slot];
                if (KIND == STATE_SPACE) result += value * skip;
                store_lanes(updates_ + slot * width + c, update);
                store_up_to(out + c, result, n);
            }
            if (block >= 0)
                write(updates_ + slot * width, a_.value_dim, a_.updates + slot_at(block, slot) * a_.value_dim);
        }
    }

    float strength_of(int64_t token) const {
        if (KIND == STATE_SPACE) return step_size((const T*)a_.step + token * a_.step_stride);
        const float b = to_float(((const T*)a_.strength)[token * a_.strength_stride + head_]);
        T narrow[LANES];
        store_lanes(narrow, 1.0f / (1.0f + exp(all(-b))));
        return to_float(narrow[0]);
    }

    const Scan& a_;
    const int64_t head_, key_head_;
    int64_t token_;
    const int64_t end_, begin_;
    const int32_t* table_;
    const int64_t keys_width_, values_width_;
    const float* state_ = nullptr;  // before the block; null: zeros
    float *own_, *keys_, *queries_, *left_, *products_, *updates_, *decays_, *weights_, *pairs_, *scale_;
};

template <Kind KIND, class T> void scan(const Scan& a) {
    const int64_t row_size = a.heads * a.value_dim * int64_t(sizeof(T));
    pool.run(a.seqs * a.heads, [&](int64_t i) {
        const int64_t seq = i / a.heads, head = i % a.heads, start = a.query_start[seq],
                      count = a.query_start[seq + 1] - start;
        if (count <= 0) return;
        if (a.rows[seq] != a.num_rows - 1) return Head<KIND, T>(a, seq, head).run();
        if (!head) std::memset((char*)a.out + start * row_size, 0, count * row_size);
    });
    const int64_t end = a.query_start[a.seqs];
    std::memset((char*)a.out + end * row_size, 0, (a.tokens - end) * row_size);
}

template <Kind KIND> void scan_of(const Scan& a) { a.is_bf16 ? scan<KIND, bf16>(a) : scan<KIND, float>(a); }

}  // namespace

extern "C" void quire_scan(const Scan* a) {
    a->kind == DELTA ? scan_of<DELTA>(*a) : a->kind == STATE_SPACE ? scan_of<STATE_SPACE>(*a) : scan_of<CHANNELS>(*a);
}
