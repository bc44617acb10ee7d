// Our attention as a candidate: pages that the recipe makes of the rows, sinks and recent tokens in BF16.
#include "attn_bench.h"

#include <crumb/cache.h>
#include <crumb/error.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <ctime>
#include <thread>

namespace crumb::app::attn {

namespace {

constexpr int kSink = 64, kRecent = 256;

double read(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// One layer's memory.
struct Memory {
    LargeVector<std::byte> coded, exact;
};

}  // namespace

double seconds(int n_threads) { return read(n_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC); }

struct Ours::State {
    Isa isa;
    AttentionLayer layer;
    std::vector<HeadTables> tables;
    AttentionMaps maps;
    AttentionPlan plan;
    std::vector<uint32_t> coded_ids, exact_ids;
    std::vector<Memory> layers;
    std::vector<float> out;
    const Rows* rows;
    AttentionWork work;
    double encode_seconds = 0;
    size_t read_bytes = 0;

    PageFormat exact_format() const { return bf16_format(layer.format.k.dim, layer.format.v.dim); }

    SequenceView view(const Memory& memory) const {
        return {{memory.coded.data(), layer.format.bytes() * layer.n_head_kv, coded_ids},
                {memory.exact.data(), exact_format().bytes() * layer.n_head_kv, exact_ids}};
    }
    AttentionIo io(std::vector<float>& to) const {
        const size_t stride = size_t(layer.n_head) * layer.format.k.dim;
        return {rows->q.data(), stride, size_t(layer.format.k.dim), to.data(), stride};
    }
};

Ours::Ours(const Task& task, const std::string& recipe_name, Isa isa) : state_(std::make_unique<State>()) {
    State& s = *state_;
    const Rows& rows = *task.rows;
    const int heads = rows.shape.n_head_kv, dim = rows.shape.dim, blocks = (task.tokens + kPageTokens - 1) / kPageTokens;
    name = fmt::format("crumb {} {}", recipe_name, crumb::name(isa));
    s.isa = isa;
    s.rows = &rows;
    const Recipe& recipe = find_recipe(recipe_name);
    if (!recipe.coded() || recipe.needs_artefact()) { fail("attn-bench makes its own tables: {} needs an artefact or has no codes; take had2", recipe_name); }
    if (recipe.page_tokens != kPageTokens) {
        fail("attn-bench fills pages of {} tokens, and those of {} have {}: take had2, or kivi32 for a recipe of groups", kPageTokens, recipe_name, recipe.page_tokens);
    }
    s.tables = layer_tables(recipe, 0, heads, page_format(recipe, dim, dim), nullptr);
    s.maps = attention_maps(s.tables);
    s.layer = {.n_head = rows.shape.n_head,
               .n_head_kv = heads,
               .format = page_format(recipe, dim, dim),
               .tables = s.tables,
               .maps = &s.maps,
               .scale = 1.0f / std::sqrt(float(dim))};
    std::vector<QueryRow> queries;
    for (int t = task.tokens - task.n_rows; t < task.tokens; ++t) {
        queries.push_back({0, uint32_t(t), t, 0, coded_edge(t, kRecent), t + 1});
    }
    s.plan = AttentionPlan(queries, kSink);
    s.out.resize(size_t(rows.tokens) * rows.shape.n_head * dim);

    // Blocks that some row reads through their codes, and those that some row reads as they are.
    const int coded_end = coded_edge(task.tokens - 1, kRecent) / kPageTokens;
    const int exact_begin = coded_edge(task.tokens - task.n_rows, kRecent) / kPageTokens;
    s.coded_ids.assign(blocks, kNoBlock);
    s.exact_ids.assign(blocks, kNoBlock);
    Memory first;
    std::vector<bf16> k(size_t(kPageTokens) * dim), v(k.size());
    const auto load = [&](int block, int head) {
        for (int t = 0; t < kPageTokens; ++t) {
            const size_t at = (size_t(std::min(block * kPageTokens + t, rows.tokens - 1)) * heads + head) * dim;
            std::transform(&rows.k[at], &rows.k[at] + dim, &k[size_t(t) * dim], to_bf16);
            std::transform(&rows.v[at], &rows.v[at] + dim, &v[size_t(t) * dim], to_bf16);
        }
    };
    uint32_t n_coded = 0, n_exact = 0;
    for (int block = 0; block < blocks; ++block) {
        const bool coded = block >= kSink / kPageTokens && block < coded_end;
        const bool exact = block < kSink / kPageTokens || block >= exact_begin;
        if (coded) { s.coded_ids[block] = n_coded++; }
        if (exact) { s.exact_ids[block] = n_exact++; }
        first.coded.resize(n_coded * heads * s.layer.format.bytes());
        first.exact.resize(n_exact * heads * s.exact_format().bytes());
        for (int head = 0; head < heads; ++head) {
            load(block, head);
            if (coded) {
                const double start = seconds(1);
                encode_page(recipe, s.layer.format, s.tables[head], k, v,
                            &first.coded[(size_t(s.coded_ids[block]) * heads + head) * s.layer.format.bytes()]);
                s.encode_seconds += seconds(1) - start;
            }
            if (!exact) { continue; }
            std::byte* page = &first.exact[(size_t(s.exact_ids[block]) * heads + head) * s.exact_format().bytes()];
            for (int t = 0; t < kPageTokens; ++t) {
                set_key(s.exact_format(), page, t, std::span(k).subspan(size_t(t) * dim, dim));
                set_value(s.exact_format(), page, t, std::span(v).subspan(size_t(t) * dim, dim));
            }
        }
    }
    s.encode_seconds /= std::max(1.0, double(n_coded) * heads);
    s.read_bytes = first.coded.size() + first.exact.size();
    for (const auto& head : s.maps.heads) { s.read_bytes += (head.k.size() + head.v.size()) * sizeof(bf16); }
    s.layers.assign(std::clamp<size_t>(task.bytes / (first.coded.size() + first.exact.size()), 1, 256), first);
}

Ours::~Ours() = default;

double Ours::run(int n_threads) {
    State& s = *state_;
    s.work.prepare(s.plan, s.layer.n_head, s.layer.n_head_kv, s.layer.format, n_threads);
    std::barrier barrier(n_threads);
    double start = 0;
    const auto body = [&](int thread) {
        barrier.arrive_and_wait();
        if (thread == 0) { start = seconds(n_threads); }
        for (const Memory& memory : s.layers) {
            const SequenceView view = s.view(memory);
            attend(s.isa, s.layer, s.plan, {&view, 1}, s.io(s.out), s.work, thread, n_threads);
            if (n_threads > 1) { barrier.arrive_and_wait(); }
        }
    };
    std::vector<std::jthread> others;
    for (int t = 1; t < n_threads; ++t) { others.emplace_back(body, t); }
    body(0);
    return (seconds(n_threads) - start) / double(s.layers.size());
}

size_t Ours::bytes() const { return state_->read_bytes; }
double Ours::encode_seconds() const { return state_->encode_seconds; }

double Ours::error(int n_rows) const {
    State& s = *state_;
    const auto all = s.plan.rows();
    const AttentionPlan some(std::vector<QueryRow>(all.end() - std::min<size_t>(all.size(), n_rows), all.end()), kSink);
    std::vector<float> want(s.out.size());
    const SequenceView view = s.view(s.layers.front());
    attend_reference(s.layer, some, {&view, 1}, s.io(want));
    double error = 0, length = 0;
    const size_t width = size_t(s.layer.n_head) * s.layer.format.v.dim;
    for (const QueryRow& row : some.rows()) {
        for (size_t i = row.token * width; i < (row.token + 1) * width; ++i) {
            error += std::pow(double(s.out[i]) - want[i], 2);
            length += std::pow(double(want[i]), 2);
        }
    }
    return std::sqrt(error / length);
}

}  // namespace crumb::app::attn
