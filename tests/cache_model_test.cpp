// Random traces of everything that an engine does to a cache, beside the obvious model of cache_model.h.
#include "cache_model.h"

#include <crumb/error.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <set>

#include "fake_device.h"

using namespace crumb;
using namespace crumb::test;

namespace {

enum class Kind {
    append,
    append_many,
    crop,
    crop_little,
    fork,
    clear,
    save_restore,
    checkpoint,
    rewind,
    abandon,
    reuse,
    last
};

struct Op {
    Kind kind;
    uint32_t a, b;
    int amount;  // 0 .. 999
};

std::ostream& operator<<(std::ostream& out, const Op& op) {
    static const char* const names[] = {"append", "append_many",  "crop",       "crop_little", "fork",
                                        "clear",  "save_restore", "checkpoint", "rewind",      "abandon", "reuse"};
    return out << names[int(op.kind)] << "(" << op.a << ", " << op.b << ", " << op.amount << ")";
}

rc::Gen<Op> any_op(int n_sequences) {
    using namespace rc;
    const auto kind =
        gen::weightedOneOf<Kind>({{4, gen::just(Kind::reuse)},
                                  {6, gen::just(Kind::append)},
                                  {6, gen::just(Kind::append_many)},
                                  {6, gen::map(gen::inRange(0, int(Kind::last)), [](int k) { return Kind(k); })}});
    return gen::construct<Op>(kind, gen::inRange<uint32_t>(0, n_sequences), gen::inRange<uint32_t>(0, n_sequences),
                              gen::inRange(0, 1000));
}

class Trace {
  public:
    explicit Trace(const Scenario& scenario)
        : scenario_(scenario), cache_(config_on(scenario, device_)), model_(cache_.config()) {}

    void apply(const Op& op) {
        const ModelSequence& a = model_.sequences[op.a];
        switch (op.kind) {
            case Kind::append:
                append({{op.a, 1 + op.amount % 8}}, op.amount);
                break;
            case Kind::append_many:
                append({{op.a, op.amount % (scenario_.step - 7)}, {op.b, op.amount % 8}}, op.amount);
                break;
            case Kind::crop:
                crop(op.a, a.length() * op.amount / 1000);
                break;
            case Kind::crop_little:
                crop(op.a, std::max(0, a.length() - op.amount % 20));
                break;
            case Kind::fork:
                fork(op.a, op.b, a.length() - (a.length() * op.amount / 1000) * (op.amount % 2));
                break;
            case Kind::clear:
                crop(op.a, 0);
                break;
            case Kind::save_restore:
                save_restore(op.a, op.b);
                break;
            case Kind::checkpoint:
                checkpoints_[op.a] = {save(cache_, op.a, true), trimmed(a)};
                break;
            case Kind::rewind:
                rewind(op.a);
                break;
            case Kind::abandon:
                abandon(op.a, 1 + op.amount % 100, op.amount);
                break;
            case Kind::reuse:
                reuse(op.a, op.b, op.amount);
                break;
            case Kind::last:
                break;
        }
        for (uint32_t i = 0; i < model_.sequences.size(); i++) {
            const int length = model_.sequences[i].length();
            RC_ASSERT(cache_.length(i) == length);
            RC_ASSERT(cache_.lowest_crop(i) == model_.lowest_crop(model_.sequences[i]));
            // All that the next token needs is there, except that a block may become due for its codes.
            RC_ASSERT(difference(cache_, model_, {i, length, length - 1, length}) == "");
        }
        RC_ASSERT(cache_.counters().aged_early_tokens == model_.aged);
        check_accounts();
    }

    void finish() {
        for (uint32_t i = 0; i < model_.sequences.size(); i++) {
            cache_.crop(i, 0);
        }
        const CacheCounters counters = cache_.counters();
        RC_ASSERT(counters.blocks_in_use == 0u);
        RC_ASSERT(counters.shared_blocks == 0u);
        RC_ASSERT(counters.host_blocks_in_use == 0u);
        RC_ASSERT(counters.exact_blocks_in_use == 0u);
        RC_ASSERT(counters.window_blocks_in_use == 0u);
    }

  private:
    struct Part {
        uint32_t sequence;
        int count;
    };

    // Tokens of the parts, interleaved.
    std::vector<StepToken> tokens_of(std::vector<Part> parts) {
        std::vector<StepToken> tokens;
        for (bool more = true; more;) {
            more = false;
            for (Part& part : parts) {
                if (part.count-- <= 0) {
                    continue;
                }
                tokens.push_back({part.sequence, next_token_++});
                more = true;
            }
        }
        return tokens;
    }

    bool must_fit(const std::vector<StepToken>& tokens) const {
        std::vector<int> lengths;
        int total = 0;
        for (const ModelSequence& s : model_.sequences) {
            lengths.push_back(s.length());
        }
        for (const StepToken& t : tokens) {
            lengths[t.sequence]++;
        }
        for (const int length : lengths) {
            total += length;
        }
        return total <= cache_.config().tokens_total && within_length(tokens);
    }

    bool within_length(const std::vector<StepToken>& tokens) const {
        std::vector<int> lengths;
        for (const ModelSequence& s : model_.sequences) {
            lengths.push_back(s.length());
        }
        for (const StepToken& t : tokens) {
            if (++lengths[t.sequence] > scenario_.tokens) {
                return false;
            }
        }
        return true;
    }

    bool begin(const std::vector<StepToken>& tokens) {
        const std::vector<Append> appends = appends_of(tokens);
        const bool fits = cache_.fits(appends);
        if (must_fit(tokens)) {
            RC_ASSERT(fits);
        }
        if (!within_length(tokens)) {
            RC_ASSERT(!fits);
        }
        RC_ASSERT(cache_.begin(appends) == fits);
        if (!fits) {
            return false;
        }
        model_.begin();
        for (const StepToken& t : tokens) {
            model_.append(t.sequence, t.token);
        }
        model_.encode_due();
        return true;
    }

    void append(const std::vector<Part>& parts, int seed) {
        const std::vector<StepToken> tokens = tokens_of(parts);
        if (tokens.empty() || !begin(tokens)) {
            return;
        }
        for (size_t layer = 0; layer < cache_.config().layers.size(); layer++) {
            if (cache_.config().layers[layer].stores) {
                store_layer(cache_, int(layer), tokens, 1 + seed % 3);
            }
        }
        check_plans(tokens);
    }

    void check_plans(const std::vector<StepToken>& tokens) {
        for (size_t layer = 0; layer < cache_.config().layers.size(); layer++) {
            const CacheLayer& l = cache_.config().layers[layer];
            if (!l.stores) {
                continue;
            }
            const auto rows = cache_.plan(int(layer)).rows();
            RC_ASSERT(rows.size() == tokens.size());
            for (size_t i = 0; i < rows.size(); i++) {
                const QueryRow& row = rows[i];
                const ModelSequence& s = model_.sequences[row.sequence];
                const bool adjacent = i > 0 && rows[i - 1].sequence == row.sequence;
                RC_ASSERT(row.position == (adjacent ? rows[i - 1].position + 1 : s.length_before));
                RC_ASSERT(row.sequence == tokens[row.token].sequence);
                RC_ASSERT(s.tokens[row.position] == tokens[row.token].token);
                RC_ASSERT(row.end == row.position + 1);
                RC_ASSERT(row.begin == (l.window == 0 ? 0 : std::max(0, row.position + 1 - l.window)));
                const int newest = scenario_.prefill == PrefillRule::exact ? s.length_before : row.position;
                RC_ASSERT(row.coded_end == (l.coded() ? model_.coded_end(s, newest) : l.has_codes() ? row.end : 0));
                const bool first_or_last = !adjacent || row.position + 1 == s.length();
                if (first_or_last) {
                    RC_ASSERT(difference(cache_, model_, {row.sequence, row.position, newest, row.end}) == "");
                }
            }
        }
    }

    void crop(uint32_t sequence, int length) {
        ModelSequence& s = model_.sequences[sequence];
        const bool possible = length == 0 || length >= model_.lowest_crop(s);
        RC_ASSERT(cache_.crop(sequence, length) == possible);
        if (possible) {
            model_.crop(s, length);
        }
    }

    void fork(uint32_t from, uint32_t to, int length) {
        if (from == to) {
            return crop(from, length);
        }
        const bool possible = length == 0 || length >= model_.lowest_crop(model_.sequences[from]);
        RC_ASSERT(cache_.fork(from, to, length) == possible);
        if (possible) {
            model_.fork(from, to, length);
        }
    }

    // A prompt that begins as some text that was seen before and goes on otherwise.
    void reuse(uint32_t sequence, uint32_t like, int amount) {
        for (const ModelSequence& s : model_.sequences) {
            texts_.push_back(s.tokens);
        }
        const std::vector<Token>& text =
            amount % 3 == 0 ? texts_[size_t(amount) % texts_.size()] : model_.sequences[like].tokens;
        std::vector<Token> prompt(text.begin(), text.begin() + long(text.size()) * (amount % 8 + 1) / 8);
        for (int i = 0; i < 1 + amount % 300; i++) {
            prompt.push_back(next_token_++);
        }
        const std::vector<int32_t> ids(prompt.begin(), prompt.end());
        ModelSequence& s = model_.sequences[sequence];
        const int most = std::min(int(prompt.size()), scenario_.tokens) - 1;
        int own = std::min(most, int(std::ranges::mismatch(prompt, s.tokens).in1 - prompt.begin()));
        if (own < s.length() && !model_.whole_window(s, own)) {
            own = scenario_.reuse == ReuseRule::codes
                      ? std::min(own, std::max(0, int(prompt.size()) - scenario_.recent))
                      : 0;
        }
        if (own < model_.lowest_crop(s)) {
            own = 0;
        }
        const int length = cache_.reuse(sequence, ids, 1 << 20);
        RC_ASSERT(length >= own && length <= std::max(0, most));
        if (length <= own) {
            model_.crop(s, length);
            return;
        }
        RC_ASSERT(length % 64 == 0);
        
        const bool aged = length > 64 * model_.sink_blocks() &&
                          cache_.views(0)[sequence].exact.ids[length / 64 - 1] == kNoBlock && scenario_.recent > 0;
        RC_ASSERT(!aged || (scenario_.reuse == ReuseRule::codes && (scenario_.window == 0 || scenario_.form == SlidingForm::pages) &&
                            length <= int(prompt.size()) - scenario_.recent));
        model_.start(sequence, {prompt.begin(), prompt.begin() + length}, aged);
    }

    ModelSequence trimmed(ModelSequence s) const {
        model_.trim(s);
        model_.settle(s);
        return s;
    }

    void save_restore(uint32_t from, uint32_t to) {
        const Bytes bytes = save(cache_, from);
        try {
            restore(cache_, to, bytes);
        } catch (const Error&) {
            RC_ASSERT(scenario_.tokens_total > 0);  // a pool for all together may be full
            return;
        }
        model_.sequences[to] = trimmed(model_.sequences[from]);
        RC_ASSERT(save(cache_, to) == bytes);
    }

    // As a server that goes back to a checkpoint of the sliding windows.
    void rewind(uint32_t sequence) {
        if (!checkpoints_.contains(sequence)) {
            return;
        }
        const auto& [bytes, then] = checkpoints_.at(sequence);
        ModelSequence& s = model_.sequences[sequence];
        if (then.length() > s.length()) {
            RC_ASSERT_THROWS_AS(restore(cache_, sequence, bytes, true), Error);
            return;
        }
        if (!std::equal(then.tokens.begin(), then.tokens.end(), s.tokens.begin())) {
            return;
        }
        restore(cache_, sequence, bytes, true);
        model_.crop(s, then.length());
        s.window_first = then.window_first;
        model_.settle(s);
    }

    // A step that stops after some layers and is cropped away.
    void abandon(uint32_t sequence, int count, int seed) {
        const std::vector<StepToken> tokens = tokens_of({{sequence, count}});
        if (!begin(tokens)) {
            return;
        }
        if (seed % 2 == 0) {
            store_layer(cache_, 0, tokens);
        }
        crop(sequence, model_.sequences[sequence].length_before);
    }

    // Pools hold what the tables name, once however often it is shared; coded blocks that were encoded again in the
    // last step wait for the next.
    void check_accounts() {
        std::set<uint32_t> coded, exact, window;
        for (size_t layer = 0; layer < cache_.config().layers.size(); layer++) {
            if (!cache_.config().layers[layer].stores) {
                continue;
            }
            const bool windowed = cache_.config().layers[layer].windowed();
            for (const SequenceView& view : cache_.views(int(layer))) {
                (windowed ? window : coded).insert(view.coded.ids.begin(), view.coded.ids.end());
                (windowed ? window : exact).insert(view.exact.ids.begin(), view.exact.ids.end());
            }
        }
        for (auto* ids : {&coded, &exact, &window}) {
            ids->erase(kNoBlock);
        }
        const CacheCounters counters = cache_.counters();
        RC_ASSERT(counters.exact_blocks_in_use == exact.size());
        RC_ASSERT(counters.window_blocks_in_use == window.size());
        RC_ASSERT(counters.host_blocks_in_use <= counters.blocks_in_use);
        RC_ASSERT(counters.blocks_in_use >= coded.size());
        RC_ASSERT(counters.blocks_in_use <= coded.size() + model_.sequences.size());
    }

    static CacheConfig config_on(const Scenario& scenario, FakeDevice& device) {
        CacheConfig config = config_of(scenario);
        if (scenario.host_memory > 0) {
            config.devices.assign(config.layers.size(), &device);
        }
        return config;
    }

    Scenario scenario_;
    FakeDevice device_;
    Cache cache_;
    Model model_;
    Token next_token_ = 0;
    std::map<uint32_t, std::pair<Bytes, ModelSequence>> checkpoints_;
    std::vector<std::vector<Token>> texts_;
};

rc::Gen<Scenario> any_scenario() {
    using namespace rc;
    return gen::build<Scenario>(gen::set(&Scenario::recipe,
                                         gen::element<std::string>("had2", "quarot:paper", "bf16", "planes:3", "kivi128",
                                                                   "ott", "kvarn:paper", "omni:layer:paper")),
                                gen::set(&Scenario::sink, gen::element(0, 4, 64, 100)),
                                gen::set(&Scenario::recent, gen::element(0, 1, 63, 64, 256)),
                                gen::set(&Scenario::window, gen::element(0, 16, 100, 200)),
                                gen::set(&Scenario::form, gen::elementOf(std::vector<SlidingForm>(std::begin(kSlidingForms), std::end(kSlidingForms)))),
                                gen::set(&Scenario::prefill, gen::element(PrefillRule::position, PrefillRule::exact)),
                                gen::set(&Scenario::reuse, gen::element(ReuseRule::exact, ReuseRule::codes)),
                                gen::set(&Scenario::spare_windows, gen::element(0, 2)),
                                gen::set(&Scenario::tokens_total, gen::element(0, 900)),
                                gen::set(&Scenario::host_memory, gen::element<size_t>(0, 30000, 60000)));
}

}  // namespace

TEST(CacheModel, RandomTraces) {
    const bool ok = rc::check("the cache reads back what the model says", [] {
        Scenario scenario = *any_scenario();
        if (find_recipe(scenario.recipe).page_tokens > 64) {
            scenario.recent = std::max(scenario.recent, 64);
        }
        RC_LOG() << "recipe " << scenario.recipe << " sink " << scenario.sink << " recent " << scenario.recent
                 << " window " << scenario.window << " " << name(scenario.form) << " total " << scenario.tokens_total
                 << " host " << scenario.host_memory << "\n";
        Trace trace(scenario);
        for (const Op& op : *rc::gen::container<std::vector<Op>>(any_op(scenario.n_sequences))) {
            trace.apply(op);
        }
        trace.finish();
    });
    EXPECT_TRUE(ok);
}
