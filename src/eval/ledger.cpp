#include "eval/ledger.h"

#include "base/json_text.h"

#include <crumb/error.h>

#include <bit>
#include <charconv>
#include <climits>
#include <cmath>
#include <limits>

namespace crumb {

namespace {

using nlohmann::json;

constexpr const char* kWindow = "window";
constexpr const char* kRetrieval = "retrieval";
constexpr const char* kTrajectory = "trajectory";
constexpr const char* kKeyShapes = "keys";

std::string id_of(const char* kind, const Key& key) { return std::string(kind) + json_text(json(key)); }

std::string hex(const std::vector<float>& values) {
    std::string text;
    for (const float x : values) { text += fmt::format("{:08x}", std::bit_cast<uint32_t>(x)); }
    return text;
}

std::vector<float> floats(const std::string& text) {
    std::vector<float> values;
    for (size_t at = 0; at < text.size(); at += 8) {
        uint32_t bits = 0;
        const char* end = text.data() + std::min(at + 8, text.size());
        if (at + 8 > text.size() || std::from_chars(text.data() + at, end, bits, 16).ptr != end) { fail("'{}' is no float", text.substr(at, 8)); }
        values.push_back(std::bit_cast<float>(bits));
        if (!std::isfinite(values.back())) { fail("a position has a divergence of {}", values.back()); }
    }
    return values;
}

// Numbers of a record, each in the range that it can have. JSON has none that is not finite.
template <class T>
T number(const json& j, const char* name, T least, T most) {
    const json& value = j.at(name);
    if (!value.is_number() || (std::is_integral_v<T> && !value.is_number_integer()) || !(value >= least && value <= most)) {
        fail("{} is {}, and must be a number from {} to {}", name, json_text(value), least, most);
    }
    return value.get<T>();
}

constexpr double kMost = std::numeric_limits<double>::max();

const json& some(const json& j, const char* name) {
    const json& list = j.at(name);
    if (!list.is_array() || list.empty()) { fail("{} is {}, and must be a list of at least one", name, json_text(list).substr(0, 40)); }
    return list;
}

json speed_of(const Speed& s) { return {{"prompt", s.prompt}, {"generated", s.generated}}; }
Speed speed_from(const json& record) {
    const json& j = record.at("speed");
    return {number(j, "prompt", 0.0, kMost), number(j, "generated", 0.0, kMost)};
}

json blocks_of(const DivergenceSum& sum) {
    json blocks = json::array();
    for (const Block& b : sum.blocks()) {
        blocks.push_back({{"kld", b.sum_kld}, {"nll_base", b.nll_base}, {"nll", b.nll}, {"same_top", b.same_top}, {"positions", hex(b.kld)}});
    }
    return blocks;
}

WindowRecord window_from(const json& record) {
    std::vector<Block> blocks;
    for (const json& b : some(record, "blocks")) {
        const auto positions = floats(b.at("positions"));
        if (positions.empty() || positions.size() > kBlockPositions) { fail("a block has {} positions, and must have 1 to {}", positions.size(), kBlockPositions); }
        blocks.push_back({positions, number(b, "kld", -kMost, kMost), number(b, "nll_base", -kMost, kMost), number(b, "nll", -kMost, kMost),
                          number(b, "same_top", size_t(0), positions.size())});
    }
    return {DivergenceSum(std::move(blocks)), speed_from(record)};
}

std::vector<Answer> answers_from(const json& record) {
    std::vector<Answer> answers;
    for (const json& a : some(record, "answers")) { answers.push_back({number(a, "depth", 0.0, 1.0), a.at("right"), number(a, "nll", -kMost, kMost)}); }
    return answers;
}

TrajectoryRecord trajectory_from(const json& record) {
    TrajectoryRecord result{{}, {}, speed_from(record)};
    for (const json& token : record.at("tokens")) {
        if (!token.is_number_integer() || token < 0) { fail("{} is no token", json_text(token)); }
        result.tokens.push_back(token);
    }
    for (const char c : record.at("agrees").get<std::string>()) {
        if (c != '0' && c != '1') { fail("agrees has '{}', and must be of 0 and 1", c); }
        result.agrees.push_back(c == '1');
    }
    const json& key = record.at("key");
    const size_t n = key.contains("follow") ? result.agrees.size() : result.tokens.size();
    if (const std::string asked = key.at("generate"); asked != std::to_string(n)) { fail("{} tokens were to be generated, and {} are here", asked, n); }
    return result;
}

std::vector<KeyShape> shapes_from(const json& record) {
    std::vector<KeyShape> shapes;
    for (const json& s : some(record, "heads")) {
        shapes.push_back({number(s, "layer", 0, INT_MAX), number(s, "head", 0, INT_MAX), number(s, "norm", 0.0, kMost), number(s, "mean_share", -kMost, kMost),
                          number(s, "unevenness", -kMost, kMost), s.at("spectrum")});
    }
    return shapes;
}

// Throws Error, or an exception of the JSON parser, that says what is wrong.
void check(const std::string& kind, const json& record) {
    if (kind == kWindow) {
        window_from(record);
    } else if (kind == kRetrieval) {
        answers_from(record);
    } else if (kind == kTrajectory) {
        trajectory_from(record);
    } else if (kind == kKeyShapes) {
        shapes_from(record);
    } else {
        fail("there is no kind '{}'", kind);
    }
}

}  // namespace

Ledger::Ledger(const std::filesystem::path& file) : file_(file, "{\"") {
    const auto& lines = file_.lines();
    for (size_t i = 0; i < lines.size(); ++i) {
        if (lines[i].empty() && i + 1 == lines.size()) { continue; }  // of an editor
        try {
            const json record = json::parse(lines[i]);
            const std::string kind = record.at("kind");
            check(kind, record);
            records_[id_of(kind.c_str(), record.at("key").get<Key>())] = lines[i];
        } catch (const std::exception& e) {
            fail("{}:{}: not a result of crumb eval ({}); delete the line, or give another file with --results FILE", file.string(), i + 1, e.what());
        }
    }
}

const std::string* Ledger::find(const char* kind, const Key& key) const {
    const auto found = records_.find(id_of(kind, key));
    return found == records_.end() ? nullptr : &found->second;
}

void Ledger::append(std::string id, std::string line) {
    file_.append(line);
    records_[std::move(id)] = std::move(line);
}

std::optional<WindowRecord> Ledger::window(const Key& key) const {
    const auto* line = find(kWindow, key);
    return line ? std::optional(window_from(json::parse(*line))) : std::nullopt;
}

std::optional<std::vector<Answer>> Ledger::retrieval(const Key& key) const {
    const auto* line = find(kRetrieval, key);
    return line ? std::optional(answers_from(json::parse(*line))) : std::nullopt;
}

std::optional<TrajectoryRecord> Ledger::trajectory(const Key& key) const {
    const auto* line = find(kTrajectory, key);
    return line ? std::optional(trajectory_from(json::parse(*line))) : std::nullopt;
}

std::optional<std::vector<KeyShape>> Ledger::keys(const Key& key) const {
    const auto* line = find(kKeyShapes, key);
    return line ? std::optional(shapes_from(json::parse(*line))) : std::nullopt;
}

void Ledger::add(const Key& key, const WindowRecord& r) {
    append(id_of(kWindow, key),
           json_text(json{{"kind", kWindow}, {"key", key}, {"speed", speed_of(r.speed)}, {"blocks", blocks_of(r.divergence)}}));
}

void Ledger::add(const Key& key, const std::vector<Answer>& answers) {
    json list = json::array();
    for (const Answer& a : answers) { list.push_back({{"depth", a.depth}, {"right", a.right}, {"nll", a.nll}}); }
    append(id_of(kRetrieval, key), json_text(json{{"kind", kRetrieval}, {"key", key}, {"answers", std::move(list)}}));
}

void Ledger::add(const Key& key, const TrajectoryRecord& r) {
    std::string agrees;
    for (const bool same : r.agrees) { agrees += same ? '1' : '0'; }
    append(id_of(kTrajectory, key),
           json_text(json{{"kind", kTrajectory}, {"key", key}, {"speed", speed_of(r.speed)}, {"tokens", r.tokens}, {"agrees", agrees}}));
}

void Ledger::add(const Key& key, const std::vector<KeyShape>& shapes) {
    json list = json::array();
    for (const KeyShape& s : shapes) {
        list.push_back({{"layer", s.layer}, {"head", s.head}, {"norm", s.norm}, {"mean_share", s.mean_share}, {"unevenness", s.unevenness}, {"spectrum", s.spectrum}});
    }
    append(id_of(kKeyShapes, key), json_text(json{{"kind", kKeyShapes}, {"key", key}, {"heads", std::move(list)}}));
}

}  // namespace crumb
