#include "eval/retrieval.h"

#include <crumb/error.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <random>

namespace crumb {

namespace {

struct ProbeName {
    Probe probe;
    std::string_view name;
};
constexpr ProbeName kNames[] = {
    {Probe::single, "single"}, {Probe::multi_key, "multi-key"}, {Probe::multi_value, "multi-value"}, {Probe::tracing, "tracing"}};

constexpr const char* kFirst[] = {"Bram", "Cald", "Dren", "Fal", "Gris", "Hol", "Ker", "Lund", "Mor", "Nes", "Ost", "Pend", "Rav", "Sel", "Thorn", "Wyn"};
constexpr const char* kSecond[] = {"bridge", "by", "combe", "den", "fell", "ham", "hurst", "ley", "mouth", "stow", "thorpe", "wick"};
constexpr const char* kThings[] = {"the number of the harbour locker", "the price of the green lantern", "the weight of the iron bell",
                                   "the file number of the old lawsuit", "the seat count of the opera house", "the serial number of the telescope",
                                   "the catalogue number of the map",  "the prize of the autumn lottery"};

constexpr int kSingles = std::size(kThings), kKeys = 32, kGroups = 8, kValues = 4, kChains = 8, kHops = 3;

class Random {
public:
    explicit Random(uint64_t seed) : engine_(seed) {}
    size_t below(size_t n) { return engine_() % n; }
    std::string number() { return std::to_string(10000 + below(90000)); }
    template <class T> void shuffle(std::vector<T>& items) {
        for (size_t i = items.size(); i > 1; --i) { std::swap(items[i - 1], items[below(i)]); }
    }

private:
    std::mt19937_64 engine_;
};

std::vector<std::string> places(Random& random, size_t n) {
    std::vector<std::string> all;
    for (const char* first : kFirst) {
        for (const char* second : kSecond) { all.push_back(std::string(first) + second); }
    }
    random.shuffle(all);
    all.resize(n);
    return all;
}

struct Task {
    size_t fact;  // the first fact that it needs
    std::string question, answer;
};

struct Plan {
    std::vector<std::string> facts;  // in order of appearance
    std::vector<Task> tasks;
};

std::string capital(std::string text) {
    text[0] = char(std::toupper(static_cast<unsigned char>(text[0])));
    return text;
}

Plan singles(Random& random) {
    std::vector<std::string> things(std::begin(kThings), std::end(kThings));
    random.shuffle(things);
    Plan plan;
    for (const auto& thing : things) {
        const auto number = random.number();
        plan.tasks.push_back({plan.facts.size(), fmt::format("What is {}?\nAnswer: {} is ", thing, capital(thing)), number});
        plan.facts.push_back(fmt::format("{} is {}.", capital(thing), number));
    }
    return plan;
}

Plan keys(Random& random) {
    Plan plan;
    for (const auto& place : places(random, kKeys)) {
        const auto number = random.number();
        plan.tasks.push_back({plan.facts.size(), fmt::format("What is the code of {0}?\nAnswer: The code of {0} is ", place), number});
        plan.facts.push_back(fmt::format("The code of {} is {}.", place, number));
    }
    return plan;
}

// Facts of all places take turns, so that the numbers of one lie far apart.
Plan values(Random& random) {
    Plan plan;
    const auto names = places(random, kGroups);
    std::vector<std::string> answers(kGroups);
    for (int value = 0; value < kValues; ++value) {
        for (int i = 0; i < kGroups; ++i) {
            const auto number = random.number();
            answers[i] += (value ? ", " : "") + number;
            plan.facts.push_back(fmt::format("One of the numbers of {} is {}.", names[i], number));
        }
    }
    for (int i = 0; i < kGroups; ++i) {
        plan.tasks.push_back({size_t(i), fmt::format("What are the {1} numbers of {0}, in order?\nAnswer: The {1} numbers of {0} are ", names[i], kValues),
                              answers[i]});
    }
    return plan;
}

Plan chains(Random& random) {
    Plan plan;
    const auto names = places(random, kChains * kHops);
    for (int i = 0; i < kChains; ++i) {
        const auto number = random.number();
        const auto& last = names[i * kHops + kHops - 1];
        plan.tasks.push_back({plan.facts.size(), fmt::format("What is the value of {0}?\nAnswer: The value of {0} is ", last), number});
        plan.facts.push_back(fmt::format("The value of {} is {}.", names[i * kHops], number));
        for (int hop = 1; hop < kHops; ++hop) {
            plan.facts.push_back(fmt::format("The value of {} is the value of {}.", names[i * kHops + hop], names[i * kHops + hop - 1]));
        }
    }
    return plan;
}

Plan plan_of(Probe probe, Random& random) {
    switch (probe) {
        case Probe::single: return singles(random);
        case Probe::multi_key: return keys(random);
        case Probe::multi_value: return values(random);
        case Probe::tracing: return chains(random);
    }
    CRUMB_ASSERT(false);
}

}  // namespace

std::string_view name(Probe probe) { return std::ranges::find(kNames, probe, &ProbeName::probe)->name; }

Probe find_probe(std::string_view name) {
    const auto found = std::ranges::find(kNames, name, &ProbeName::name);
    if (found != std::end(kNames)) { return found->probe; }
    std::string names;
    for (const auto& row : kNames) { names.append(names.empty() ? "" : ", ").append(row.name); }
    fail("there is no retrieval probe '{}'. Probes are: {}", name, names);
}

std::vector<std::string> paragraphs(const std::string& text) {
    constexpr size_t shortest = 200, longest = 900;
    std::vector<std::string> result;
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find("\n\n", at), text.size());
        if (end - at >= shortest && end - at <= longest) {
            std::string paragraph = text.substr(at, end - at);
            std::replace(paragraph.begin(), paragraph.end(), '\n', ' ');
            result.push_back(std::move(paragraph));
        }
        at = end + 2;
    }
    return result;
}

Haystack build_haystack(Probe probe, int length, uint64_t seed, std::span<const std::string> hay, std::span<const int32_t> begin,
                        const Tokenize& tokenize) {
    if (hay.empty()) { fail("the haystack text has no paragraph of 200 to 900 characters between blank lines: give another with --haystack"); }
    Random random(seed);
    const Plan plan = plan_of(probe, random);
    std::vector<size_t> order(hay.size());
    for (size_t i = 0; i < order.size(); ++i) { order[i] = i; }
    random.shuffle(order);

    Haystack result;
    size_t longest = 0;
    for (const auto& task : plan.tasks) {
        result.questions.push_back({0, tokenize("\n\nQuestion: " + task.question), tokenize(task.answer)});
        longest = std::max(longest, result.questions.back().prompt.size() + result.questions.back().answer.size());
    }
    std::vector<std::vector<int32_t>> facts;
    size_t fact_tokens = 0;
    for (const auto& fact : plan.facts) {
        facts.push_back(tokenize(fact + "\n\n"));
        fact_tokens += facts.back().size();
    }
    auto& prefix = result.prefix;
    prefix.assign(begin.begin(), begin.end());
    const auto opening = tokenize("The text below hides some numbers. Remember them.\n\n");
    prefix.insert(prefix.end(), opening.begin(), opening.end());
    if (prefix.size() + fact_tokens + longest > size_t(std::max(length, 0))) {
        fail("a {} haystack of {} tokens has no room for its {} tokens of facts and {} of a question: take a larger -c", name(probe), length,
             fact_tokens, longest);
    }
    const size_t room = size_t(length) - longest, all_hay = room - prefix.size() - fact_tokens;
    size_t paragraph = 0, hay_tokens = 0;
    std::vector<size_t> starts;
    for (size_t i = 0; i <= facts.size(); ++i) {
        // The hay before fact i, paragraphs cut where the fact is due: facts stand evenly, whatever the paragraphs are.
        const size_t due = all_hay * (i + 1) / (facts.size() + 1);
        while (hay_tokens < due) {
            auto tokens = tokenize(hay[order[paragraph++ % order.size()]] + "\n\n");
            tokens.resize(std::min(tokens.size(), due - hay_tokens));
            CRUMB_ASSERT(!tokens.empty());
            hay_tokens += tokens.size();
            prefix.insert(prefix.end(), tokens.begin(), tokens.end());
        }
        if (i < facts.size()) {
            starts.push_back(prefix.size());
            prefix.insert(prefix.end(), facts[i].begin(), facts[i].end());
        }
    }
    for (size_t i = 0; i < plan.tasks.size(); ++i) {
        result.questions[i].depth = double(starts[plan.tasks[i].fact]) / double(prefix.size());
    }
    return result;
}

TokenAnswer judge(std::span<const float> logits, int32_t wanted) {
    CRUMB_ASSERT(wanted >= 0 && size_t(wanted) < logits.size());
    const auto top = std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float x : logits) { sum += std::exp(double(x) - *top); }
    const double nll = std::log(sum) + *top - logits[wanted];
    if (!std::isfinite(nll)) { fail("the logits of a retrieval question are not finite: the model or its KV cache is broken"); }
    return {top - logits.begin() == wanted, nll};
}

}  // namespace crumb
