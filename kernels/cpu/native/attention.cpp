// Attention over the paged KV cache, which it reads in place: tiles of queries over tiles of keys with a running
// softmax, in float32. Sequences of one query each that begin with the same blocks read these once. A row's sums are
// those of its sequence alone, bit for bit.
#include <algorithm>
#include <vector>

#include "pool.h"
#include "simd.h"

struct Attention {
    const void *query, *keys, *values;  // [tokens, heads, head_dim]; [blocks, kv_heads, block_size, head_dim]
    void* out;                          // [tokens, heads, head_dim]
    // starts: of each sequence and the end of the last; null: one token each
    const int32_t *tables, *rows, *starts, *lens;
    const float *slopes, *sinks;        // [heads], or null
    const float* kv_scale;              // [2, kv_heads]: factors of keys and values; or null
    const float* distance_bias;         // [heads, 2 reach + 1]: added to scores by the distance from the query; or null
    int64_t query_stride, out_stride, table_stride, block_stride, head_stride;  // in elements
    int32_t seqs, heads, kv_heads, head_dim, block_size, window;
    float scale, soft_cap;
    int32_t is_bf16;  // queries and outputs; else float32
    int32_t is_fp8;   // keys and values: e4m3; else as queries
    int32_t is_causal;  // else queries see later keys too
    // Block-sparse attention: `BlockSparse.constants`. Blocks are tiles of keys or several of them; 0: queries see all
    // keys.
    int32_t sparse_block, sparse_local, sparse_stride, sparse_step, sparse_first;
    int32_t reach;
};

namespace {

constexpr int KEYS = 64;   // in a tile
constexpr int ROWS = 64;   // about the most rows (pairs of a query and a head) in a tile
constexpr int VECTORS = KEYS / LANES;
// Vectors beside each other in a register tile of so many rows: few rows with few vectors would wait for their own
// sums.
constexpr int columns(int rows) { return rows == 1 ? 4 * WIDE : rows == 2 ? 2 * WIDE : WIDE; }

constexpr int SHARED = 512;  // fewer common keys are read for each sequence

struct Tile {
    int seq, first, count, kv_head;  // queries of a sequence; or
    int members = 1, shared = 0;     // of several sequences of one query, whose first keys are the same
    const int* seqs = nullptr;       // these sequences
    int head = -1;                   // the only one of the KV head's query heads; -1: all of them
};

// Vectors become columns of `out`.
inline void transpose(Floats (&v)[LANES], float* out, int stride) {
    each<log2(LANES)>([&](auto step) {
        constexpr int half = 1 << step;
        Floats w[LANES];
        each<LANES / 2>([&](auto pair) {
            constexpr int i = pair / half * 2 * half + pair % half;
            Ints low, high;  // lanes of the pair of rows: their blocks of `half` lanes off the diagonal change places
            for (int lane = 0; lane < LANES; ++lane) {
                low[lane] = lane & half ? LANES + (lane ^ half) : lane;
                high[lane] = lane & half ? LANES + lane : lane ^ half;
            }
            w[i] = pick(v[i], v[i + half], low);
            w[i + half] = pick(v[i], v[i + half], high);
        });
        each<LANES>([&](auto i) { v[i] = w[i]; });
    });
    each<LANES>([&](auto i) { store(out + i * stride, v[i]); });
}

struct Buffers {
    std::vector<float> query, out, keys, scores;  // [rows, D], [rows, D], [D, KEYS], [rows, KEYS]
    std::vector<float> most, total;               // of each row, so far
    std::vector<int> tokens, positions;           // of each query
    std::vector<std::pair<int, int>> seeing;      // first and past row of those that see a tile of keys
    const Tile* asked = nullptr;                  // the tile whose first values have been asked for
};

// Keys of a sequence, from `first` to `past`.
struct Keys {
    int seq, kv_head, first, past;
};

struct Sharing {
    struct Group {
        int first, count, keys;  // of `seqs`; the first keys, which all of these have
    };
    std::vector<int> seqs;
    std::vector<Group> groups;
};

// Sequences of one query that begin with the same blocks for at least `SHARED` keys, in groups of at most `most`.
Sharing find_shared(const Attention& a, int most) {
    Sharing found;
    if (a.window || a.sparse_block || !a.is_causal || a.seqs < 2 || most < 2) return found;
    std::vector<int64_t> long_ones;  // the first block of each, and its number
    for (int seq = 0; seq < a.seqs; ++seq)
        if (a.lens[seq] > SHARED && (!a.starts || a.starts[seq + 1] - a.starts[seq] == 1))
            long_ones.push_back((int64_t)a.tables[a.rows[seq] * a.table_stride] << 32 | seq);
    if (long_ones.size() < 2) return found;
    std::sort(long_ones.begin(), long_ones.end());
    const auto common = [&](int one, int other) {  // keys before the queries, in whole tiles
        const int32_t *x = a.tables + a.rows[one] * a.table_stride, *y = a.tables + a.rows[other] * a.table_stride;
        const int keys = std::min(a.lens[one], a.lens[other]) - 1;
        int block = 0;
        while ((block + 1) * a.block_size <= keys && x[block] == y[block]) ++block;
        return block * a.block_size / KEYS * KEYS;
    };
    for (size_t i = 0; i + 1 < long_ones.size();) {
        const int first = (int32_t)long_ones[i];
        int count = 1, keys = 0;
        for (; i + count < long_ones.size() && count < most && long_ones[i + count] >> 32 == long_ones[i] >> 32;
            ++count) {
            const int with_it = common(first, (int32_t)long_ones[i + count]);
            if (with_it < SHARED || with_it < keys / 2) break;
            keys = count > 1 ? std::min(keys, with_it) : with_it;
        }
        if (count > 1) {
            found.groups.push_back({(int)found.seqs.size(), count, keys});
            for (int n = 0; n < count; ++n) found.seqs.push_back((int32_t)long_ones[i + n]);
        }
        i += count;
    }
    return found;
}

// As many as fit in a tile, if each thread still gets two.
int most_members(const Attention& a, int threads) {
    return std::min(ROWS / (a.heads / a.kv_heads), a.seqs * a.kv_heads / (2 * threads));
}

// T: of queries and outputs; C: of keys and values.
template <class T, class C> struct Worker {
    const Attention& a;
    Buffers& buffers;
    std::vector<float>&query = buffers.query, &out = buffers.out, &keys = buffers.keys, &scores = buffers.scores;
    std::vector<float>&most = buffers.most, &total = buffers.total;

    int group = 0, first_head = 0;  // the tile's heads

    // A query's rows are neighbours, but a head's are if heads see different blocks.
    int query_of(int r) const { return a.sparse_block ? r % (int)buffers.positions.size() : r / group; }
    int head_of(int r) const { return first_head + (a.sparse_block ? r / (int)buffers.positions.size() : r % group); }

    // The keys that a tile reads first.
    Keys keys_of(const Tile& tile) const {
        if (tile.seqs) return {tile.seqs[0], tile.kv_head, 0, tile.shared};
        const int start = a.starts ? a.starts[tile.seq] : tile.seq, end = a.starts ? a.starts[tile.seq + 1] : start + 1;
        const int length = a.lens[tile.seq], position = length - (end - start) + tile.first,
                  last = position + tile.count;
        const int past = a.is_causal ? last : a.window && last - 1 < length - a.window ? last - 1 + a.window : length;
        return {tile.seq, tile.kv_head, a.window && position + 1 > a.window ? position + 1 - a.window : 0, past};
    }

    // `following`: the tile that this thread will probably compute next, or null.
    void run(const Tile& tile, const Tile* following) {
        group = tile.head < 0 ? a.heads / a.kv_heads : 1;
        first_head = tile.kv_head * (a.heads / a.kv_heads) + (tile.head < 0 ? 0 : tile.head);
        const int queries = tile.members * tile.count, rows = queries * group, d = a.head_dim;
        std::vector<int>&tokens = buffers.tokens, &positions = buffers.positions;  // of each query
        tokens.resize(queries), positions.resize(queries);
        for (int n = 0; n < queries; ++n) {
            const int seq = tile.seqs ? tile.seqs[n] : tile.seq, index = tile.seqs ? 0 : tile.first + n;
            const int start = a.starts ? a.starts[seq] : seq, end = a.starts ? a.starts[seq + 1] : start + 1;
            tokens[n] = start + index, positions[n] = a.lens[seq] - (end - start) + index;
        }
        query.resize(rows * d), scores.resize(rows * KEYS), keys.resize(d * KEYS);
        out.assign(rows * d, 0), most.assign(rows, -INFINITY), total.assign(rows, 0);
        const float key_scale = a.kv_scale ? a.kv_scale[tile.kv_head] : 1;
        const float value_scale = a.kv_scale ? a.kv_scale[a.kv_heads + tile.kv_head] : 1;
        for (int r = 0; r < rows; ++r) {
            const int head = head_of(r);
            const T* q = (const T*)a.query + tokens[query_of(r)] * a.query_stride + head * d;
            for (int i = 0; i < d; i += LANES) store(&query[r * d + i], load_lanes(q + i) * (a.scale * key_scale));
            if (a.sinks) most[r] = a.sinks[head], total[r] = 1;
        }
        bool are_asked = buffers.asked == &tile;
        read(keys_of(tile), tile.seqs ? nullptr : following, 0, rows, are_asked);
        if (tile.seqs)
            for (int n = 0; n < queries; ++n)
                read({tile.seqs[n], tile.kv_head, tile.shared, positions[n] + 1}, nullptr, n * group, (n + 1) * group,
                    false);
        for (int r = 0; r < rows; ++r) {
            T* to = (T*)a.out + tokens[query_of(r)] * a.out_stride + head_of(r) * d;
            const float scale = value_scale / total[r];
            for (int i = 0; i < d; i += LANES) store_lanes(to + i, load<Floats>(&out[r * d + i]) * scale);
        }
    }

    // Where the keys are of a tile that begins at `key`; those that it has not are where a neighbour is.
    void locate(const Keys& some, int key, int64_t (&at)[KEYS]) const {
        const int32_t* table = a.tables + a.rows[some.seq] * a.table_stride;
        const int from = key < some.first ? some.first - key : 0, count = std::min(some.past - key, KEYS);
        for (int j = from, block = (key + from) / a.block_size, within = (key + from) % a.block_size; j < count;
            ++block, within = 0)
            for (; within < a.block_size && j < count; ++within, ++j)
                at[j] = table[block] * a.block_stride + some.kv_head * a.head_stride + within * a.head_dim;
        std::fill(at, at + from, at[from]);
        std::fill(at + count, at + KEYS, at[count - 1]);
    }

    // Rows from `top` to `bottom` attend to keys of a sequence. Tiles begin at multiples of KEYS, so that a row's sums
    // are the same in whatever tile of queries it is; keys before the first are not read. What is read next is asked
    // for meanwhile.
    void read(const Keys& some, const Tile* following, int top, int bottom, bool are_asked) {
        auto& seeing = buffers.seeing;
        seeing.assign(1, {top, bottom});
        const bool few = bottom - top <= TALL;
        int64_t at[KEYS], next[KEYS];
        for (int key = some.first / KEYS * KEYS; key < some.past; key += KEYS) {
            if (a.sparse_block) find_seeing(key / a.sparse_block);
            if (seeing.empty()) continue;
            const int from = key < some.first ? some.first - key : 0, count = std::min(some.past - key, KEYS);
            locate(some, key, at);
            if (key + KEYS < some.past) {
                locate(some, key + KEYS, next);
            } else if (const Keys after = following ? keys_of(*following) : Keys{}; after.past > 0) {
                locate(after, after.first / KEYS * KEYS, next);
                buffers.asked = few ? following : nullptr;
            } else {
                std::copy(at, at + KEYS, next);
            }
            for (int j = from; j < count && !are_asked; ++j)  // their values come while the keys are multiplied
                for (int i = 0; i < a.head_dim; i += 64 / int(sizeof(C)))
                    __builtin_prefetch((const C*)a.values + at[j] + i);
            are_asked = few && !a.sparse_block;
            read_keys(at, from, count, next);
            for (const auto& [begin, end] : seeing)
                by_rows<TALL>(begin, end, [&](auto m, int r) { score<m>(r, count); });
            const bool all_plain = count - from == KEYS && !a.slopes && !a.soft_cap && !a.window && !a.distance_bias;
            for (const auto& [begin, end] : seeing)
                for (int r = begin; r < end; ++r) {
                    const int own = buffers.positions[query_of(r)];
                    if (all_plain && (own >= key + KEYS - 1 || !a.is_causal)) soften<true>(r, 0, own, key, count);
                    else soften<false>(r, head_of(r), own, key, count);
                }
            // channels whose values many rows find in the first cache
            const int wide = bottom - top < TALL ? a.head_dim : WIDE * LANES;
            for (int i = 0; i < a.head_dim; i += wide)
                for (const auto& [begin, end] : seeing)
                    by_rows<TALL>(begin, end, [&](auto m, int r) {
                        if (few) add_values<m, true>(r, i, std::min(i + wide, a.head_dim), at, from, count, next);
                        else add_values<m, false>(r, i, std::min(i + wide, a.head_dim), at, from, count, next);
                    });
        }
    }

    // The rows that see a block: of a head all, or those whose queries it is local to, which are the first ones.
    void find_seeing(int block) {
        auto& seeing = buffers.seeing;
        const auto& positions = buffers.positions;
        seeing.clear();
        const int queries = positions.size();
        for (int head = 0; head < group; ++head) {
            int count = queries;
            if ((block + (a.sparse_first + first_head + head) * a.sparse_step + 1) % a.sparse_stride)
                while (count && positions[count - 1] / a.sparse_block - block >= a.sparse_local) --count;
            const int begin = head * queries;
            if (count && !seeing.empty() && seeing.back().second == begin) seeing.back().second = begin + count;
            else if (count) seeing.push_back({begin, begin + count});
        }
    }

    template <int M, class Work> static void by_rows(int r, int rows, const Work& work) {
        for (; r + M <= rows; r += M) work(std::integral_constant<int, M>{}, r);
        if constexpr (M > 1) by_rows<(M > 4 ? 4 : M - 1)>(r, rows, work);
    }

    // A tile of keys in float32, a channel's keys side by side.
    void read_keys(const int64_t* at, int from, int count, const int64_t* next) {
        for (int j = 0; j < KEYS; j += LANES) {
            if (j >= count || j + LANES <= from) {
                for (int i = 0; i < a.head_dim; ++i) store(&keys[i * KEYS + j], Floats{});
                continue;
            }
            for (int i = 0; i < a.head_dim; i += LANES) {
                if (i * sizeof(C) % 64 == 0)
                    for (int n = 0; n < LANES; ++n) __builtin_prefetch((const C*)a.keys + next[j + n] + i, 0, 2);
                Floats v[LANES];
                if (j >= from && j + LANES <= count)
                    each<LANES>([&](auto n) { v[n] = load_lanes((const C*)a.keys + at[j + n] + i); });
                else
                    each<LANES>([&](auto n) {
                        v[n] = j + n >= from && j + n < count ? load_lanes((const C*)a.keys + at[j + n] + i) : Floats{};
                    });
                transpose(v, &keys[i * KEYS + j], KEYS);
            }
        }
    }

    template <int M> void score(int r, int count) {
        constexpr int N = columns(M) < VECTORS ? columns(M) : VECTORS;
        for (int from = 0; from < count; from += N * LANES) {
            Floats acc[M][N] = {};
            const float *q = &query[r * a.head_dim], *k = &keys[from];
            for (int i = 0; i < a.head_dim; ++i, k += KEYS) {
                Floats v[N];
                each<N>([&](auto n) { v[n] = load<Floats>(k + n * LANES); });
                each<M>([&](auto m) {
                    Floats y = all(q[m * a.head_dim + i]);
                    each<N>([&](auto n) { acc[m][n] += v[n] * y; });
                });
            }
            each<M>([&](auto m) {
                each<N>([&](auto n) { store(&scores[(r + m) * KEYS + from + n * LANES], acc[m][n]); });
            });
        }
    }

    // Biases of keys at a distance from the query, and of those after them.
    Floats bias(int head, int distance) {
        const float* of_head = a.distance_bias + head * (2 * a.reach + 1) + a.reach;
        if (distance >= -a.reach && distance + LANES - 1 <= a.reach) return load<Floats>(of_head + distance);
        Floats found;
        for (int i = 0; i < LANES; ++i) found[i] = of_head[std::max(-a.reach, std::min(a.reach, distance + i))];
        return found;
    }

    // Scores to weights; what came before shrinks where a larger score comes. PLAIN: every key is seen, and nothing
    // else changes.
    template <bool PLAIN> void soften(int r, int head, int position, int key, int count) {
        Floats s[VECTORS], top = all(-INFINITY);
        Ints lane;
        for (int i = 0; i < LANES; ++i) lane[i] = i;
        const int used = PLAIN ? VECTORS : (count + LANES - 1) / LANES;
        for (int n = 0; n < used; ++n) {
            s[n] = load<Floats>(&scores[r * KEYS + n * LANES]);
            if (!PLAIN) {
                if (a.soft_cap) s[n] = tanh(s[n] / a.soft_cap) * a.soft_cap;
                Ints distance = position - key - n * LANES - lane;
                if (!a.is_causal) distance = distance < 0 ? -distance : distance;
                if (a.slopes) s[n] -= __builtin_convertvector(distance, Floats) * a.slopes[head];
                if (a.distance_bias) s[n] += bias(head, key + n * LANES - position);
                Ints seen = (distance >= 0) & (lane < count - n * LANES);
                if (a.window) seen &= distance < a.window;
                s[n] = seen ? s[n] : all(-INFINITY);
            }
            top = larger(s[n], top);
        }
        float highest = largest(top);
        highest = highest < most[r] ? most[r] : highest;
        const float base = highest == -INFINITY ? 0 : highest, shrunk = exp(all(most[r] - base))[0];
        Floats added{};
        for (int n = 0; n < used; ++n) {
            s[n] = exp(s[n] - base);
            added += s[n];
            store(&scores[r * KEYS + n * LANES], s[n]);
        }
        most[r] = highest;
        total[r] = total[r] * shrunk + sum(added);
        if (shrunk != 1)
            for (int i = 0; i < a.head_dim; i += LANES)
                store(&out[r * a.head_dim + i], load<Floats>(&out[r * a.head_dim + i]) * shrunk);
    }

    // ASKS: for the values at `next`.
    template <int M, bool ASKS>
    void add_values(int r, int i, int end, const int64_t* at, int from, int count, const int64_t* next) {
        constexpr int N = columns(M);
        for (; i + N * LANES <= end; i += N * LANES) add_channels<M, N, ASKS>(r, i, at, from, count, next);
        if constexpr (N > WIDE)
            for (; i + WIDE * LANES <= end; i += WIDE * LANES) add_channels<M, WIDE, ASKS>(r, i, at, from, count, next);
        for (; i < end; i += LANES) add_channels<M, 1, ASKS>(r, i, at, from, count, next);
    }

    template <int M, int N, bool ASKS>
    void add_channels(int r, int channel, const int64_t* at, int from, int count, const int64_t* next) {
        Floats acc[M][N];
        float* to = &out[r * a.head_dim + channel];
        each<M>([&](auto m) { each<N>([&](auto n) { acc[m][n] = load<Floats>(to + m * a.head_dim + n * LANES); }); });
        for (int j = from; j < count; ++j) {
            Floats v[N];
            each<N>([&](auto n) { v[n] = load_lanes((const C*)a.values + at[j] + channel + n * LANES); });
            if (ASKS)
                for (int i = 0; i < N * LANES; i += 64 / int(sizeof(C)))
                    __builtin_prefetch((const C*)a.values + next[j] + channel + i, 0, 2);
            each<M>([&](auto m) {
                Floats y = all(scores[(r + m) * KEYS + j]);
                each<N>([&](auto n) { acc[m][n] += v[n] * y; });
            });
        }
        each<M>([&](auto m) { each<N>([&](auto n) { store(to + m * a.head_dim + n * LANES, acc[m][n]); }); });
    }
};

template <class T, class C> void attend(const Attention& a) {
    const int group = a.heads / a.kv_heads, most = ROWS / group > 0 ? ROWS / group : 1;
    const Sharing sharing = find_shared(a, most_members(a, pool.threads));
    std::vector<char> has_tile(sharing.seqs.empty() ? 0 : a.seqs);
    std::vector<Tile> tiles;
    for (const Sharing::Group& each : sharing.groups) {
        const int* seqs = &sharing.seqs[each.first];
        for (int n = 0; n < each.count; ++n) has_tile[seqs[n]] = 1;
        for (int head = 0; head < a.kv_heads; ++head)
            tiles.push_back({seqs[0], 0, 1, head, each.count, each.keys, seqs});
    }
    for (int seq = a.seqs - 1; seq >= 0; --seq) {  // the last queries, with the most keys, first
        const int start = a.starts ? a.starts[seq] : seq, count = a.starts ? a.starts[seq + 1] - start : 1;
        if (!has_tile.empty() && has_tile[seq]) continue;
        if (a.lens[seq] == 0) {
            for (int t = start; t < start + count; ++t)
                std::memset((T*)a.out + t * a.out_stride, 0, a.heads * a.head_dim * sizeof(T));
            continue;
        }
        // Heads that see different blocks share no tile of keys: each has queries enough for tiles of its own.
        const bool by_head = a.sparse_block && a.sparse_step && count > most;
        const int step = by_head ? ROWS : most;
        for (int first = (count - 1) / step * step; first >= 0 && count; first -= step)
            for (int head = 0; head < a.kv_heads; ++head)
                for (int one = by_head ? 0 : -1; one < (by_head ? group : 0); ++one)
                    tiles.push_back({seq, first, std::min(count - first, step), head, 1, 0, nullptr, one});
    }
    pool.run(tiles.size(), [&](int64_t i) {
        thread_local Buffers buffers;
        const size_t following = i + pool.threads;
        Worker<T, C>{a, buffers}.run(tiles[i], following < tiles.size() ? &tiles[following] : nullptr);
    });
}

}  // namespace

// How often a key of a sequence is not read again, with at most `most` sequences in a group.
extern "C" int64_t quire_shared_keys(const Attention* a, int64_t most) {
    int64_t keys = 0;
    for (const auto& each : find_shared(*a, (int)most).groups) keys += (int64_t)(each.count - 1) * each.keys;
    return keys;
}

extern "C" void quire_attention(const Attention* a) {
    if (a->is_bf16)
        a->is_fp8 ? attend<bf16, e4m3>(*a) : attend<bf16, bf16>(*a);
    else
        a->is_fp8 ? attend<float, e4m3>(*a) : attend<float, float>(*a);
}
