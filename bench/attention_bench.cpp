// Time of attention in one layer, by instruction set: attention_bench --benchmark_filter=decode
// Pages are random codes with 8-bit gains, 2 bits an element; rows see 64 sink and 256 recent tokens as BF16. Layers
// take turns, so that codes come from memory as they do in a model. Rates: attended tokens, and multiply-adds of Q K
// and P V.
#include <benchmark/benchmark.h>
#include <crumb/attention.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

namespace crumb {
namespace {

constexpr int kSink = 64, kRecent = 256;

struct Model {
    const char* name;
    int n_head, n_head_kv, dim, layers;
};

const Model kModels[] = {{"9/3x64", 9, 3, 64, 30}, {"12/2x128", 12, 2, 128, 28}, {"32/8x128", 32, 8, 128, 8}};

// Layers of one sequence of `tokens` tokens, of which the last `n_rows` are queries.
class Step {
  public:
    Step(const Model& model, int tokens, int n_rows)
        : model_(model), format_{side(model.dim), side(model.dim)}, plan_(rows(tokens, n_rows), kSink) {
        std::mt19937 random(1);
        std::normal_distribution<float> normal;
        const int blocks = (tokens + kPageTokens - 1) / kPageTokens;
        for (int b = 0; b < blocks; b++) ids_.push_back(uint32_t(b));
        q_.resize(size_t(n_rows) * model.n_head * model.dim);
        for (float& x : q_) x = normal(random);
        out_.resize(q_.size());
        tables_.resize(model.n_head_kv);
        for (HeadTables& head : tables_) {
            for (SideTables* side : {&head.k, &head.v}) {
                side->format = format_.k;
                side->decode.resize(size_t(model.dim) * model.dim);
                for (float& x : side->decode) x = normal(random) / std::sqrt(float(model.dim));
            }
        }
        maps_ = attention_maps(tables_);
        const size_t coded = format_.bytes() * model.n_head_kv, exact = exact_format().bytes() * model.n_head_kv;
        exact_.resize(exact * blocks);
        for (size_t i = 0; i < exact_.size(); i += sizeof(bf16)) {
            const bf16 x = to_bf16(normal(random));
            std::memcpy(&exact_[i], &x, sizeof x);
        }
        coded_.resize(model.layers);
        for (auto& layer : coded_) {
            layer.resize(coded * blocks);
            for (std::byte& x : layer) x = std::byte(random() % 128 + 64);
        }
    }

    void run(Isa isa, int n_threads) {
        const std::vector<std::byte>& coded = coded_[next_++ % coded_.size()];
        const AttentionLayer layer{.n_head = model_.n_head,
                                   .n_head_kv = model_.n_head_kv,
                                   .format = format_,
                                   .tables = tables_,
                                   .maps = &maps_,
                                   .scale = 1.0f / std::sqrt(float(model_.dim))};
        const SequenceView view{{coded.data(), format_.bytes() * model_.n_head_kv, ids_},
                                {exact_.data(), exact_format().bytes() * model_.n_head_kv, ids_}};
        const size_t stride = size_t(model_.n_head) * model_.dim;
        const AttentionIo io{q_.data(), stride, size_t(model_.dim), out_.data(), stride};
        work_.prepare(plan_, model_.n_head, model_.n_head_kv, format_, n_threads);
        std::vector<std::thread> others;
        for (int t = 1; t < n_threads; t++) {
            others.emplace_back([&, t] { attend(isa, layer, plan_, {&view, 1}, io, work_, t, n_threads); });
        }
        attend(isa, layer, plan_, {&view, 1}, io, work_, 0, n_threads);
        for (std::thread& thread : others) thread.join();
    }

    double multiply_adds() const {
        double tokens = 0;
        for (const QueryRow& row : plan_.rows()) tokens += row.end;
        return tokens * 2 * model_.dim * model_.n_head;
    }

  private:
    static SideFormat side(int dim) { return {dim, padded_planes(dim, 1), SideInfo::gain8, false}; }
    PageFormat exact_format() const { return bf16_format(model_.dim, model_.dim); }

    static std::vector<QueryRow> rows(int tokens, int n_rows) {
        std::vector<QueryRow> rows;
        for (int t = tokens - n_rows; t < tokens; t++) {
            const int coded_end = kPageTokens * (std::max(0, t + 1 - kRecent) / kPageTokens);
            rows.push_back({0, uint32_t(rows.size()), t, 0, coded_end, t + 1});
        }
        return rows;
    }

    Model model_;
    PageFormat format_;
    AttentionPlan plan_;
    std::vector<HeadTables> tables_;
    AttentionMaps maps_;
    std::vector<uint32_t> ids_;
    std::vector<std::vector<std::byte>> coded_;
    std::vector<std::byte> exact_;
    std::vector<float> q_, out_;
    AttentionWork work_;
    size_t next_ = 0;
};

void measure(benchmark::State& state, const Model& model, Isa isa, int tokens, int n_rows, int n_threads) {
    Step step(model, tokens, n_rows);
    step.run(isa, n_threads);
    for (auto _ : state) step.run(isa, n_threads);
    state.counters["MAC/s"] = benchmark::Counter(step.multiply_adds(), benchmark::Counter::kIsIterationInvariantRate);
}

void add(const std::string& what, const Model& model, Isa isa, int tokens, int n_rows, int n_threads) {
    const std::string label = what + " " + model.name + " " + name(isa) + " threads:" + std::to_string(n_threads);
    benchmark::RegisterBenchmark(
        label.c_str(), [=](benchmark::State& state) { measure(state, model, isa, tokens, n_rows, n_threads); })
        ->Unit(benchmark::kMicrosecond)
        ->UseRealTime();
}

void add_all() {
    for (const Isa isa : kIsas) {
        if (!supported(isa)) continue;
        for (const Model& model : kModels) {
            for (const int n_threads : {1, 2}) {
                add("decode @8k", model, isa, 8192, 1, n_threads);
                add("decode @32k", model, isa, 32768, 1, n_threads);
                add("prefill 512 @8k", model, isa, 8192 + 512, 512, n_threads);
            }
        }
    }
}

}  // namespace
}  // namespace crumb

int main(int argc, char** argv) {
    crumb::add_all();
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
    benchmark::RunSpecifiedBenchmarks();
}
