#include "eval/ledger.h"

#include <crumb/error.h>
#include <nlohmann/json.hpp>

#include <bit>
#include <charconv>

namespace crumb {

namespace {

using nlohmann::json;

constexpr const char* kWindow = "window";
constexpr const char* kRetrieval = "retrieval";
constexpr const char* kTrajectory = "trajectory";
constexpr const char* kKeyShapes = "keys";

std::string id_of(const char* kind, const json& key) { return std::string(kind) + key.dump(); }

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
        if (std::from_chars(text.data() + at, end, bits, 16).ptr != end) { fail("'{}' is no float", text.substr(at, 8)); }
        values.push_back(std::bit_cast<float>(bits));
    }
    return values;
}

json speed_of(const Speed& s) { return {{"prompt", s.prompt}, {"generated", s.generated}}; }
Speed speed_from(const json& j) { return {j.at("prompt"), j.at("generated")}; }

json blocks_of(const DivergenceSum& sum) {
    json blocks = json::array();
    for (const Block& b : sum.blocks()) {
        blocks.push_back({{"kld", b.sum_kld}, {"nll_base", b.nll_base}, {"nll", b.nll}, {"same_top", b.same_top}, {"positions", hex(b.kld)}});
    }
    return blocks;
}

std::vector<Block> blocks_from(const json& j) {
    std::vector<Block> blocks;
    for (const json& b : j) {
        blocks.push_back({floats(b.at("positions")), b.at("kld"), b.at("nll_base"), b.at("nll"), b.at("same_top")});
    }
    return blocks;
}

}  // namespace

Ledger::Ledger(const std::filesystem::path& file) : file_(file, "{\"") {
    for (size_t i = 0; i < file_.lines().size(); ++i) {
        try {
            const json record = json::parse(file_.lines()[i]);
            records_[id_of(record.at("kind").get<std::string>().c_str(), record.at("key"))] = file_.lines()[i];
        } catch (const std::exception& e) {
            fail("{}, line {}: not a result of crumb eval ({}); give another file with --results FILE", file.string(), i + 1, e.what());
        }
    }
}

const std::string* Ledger::find(const char* kind, const Key& key) const {
    const auto found = records_.find(id_of(kind, json(key)));
    return found == records_.end() ? nullptr : &found->second;
}

void Ledger::append(std::string id, std::string line) {
    file_.append(line);
    records_[std::move(id)] = std::move(line);
}

std::optional<WindowRecord> Ledger::window(const Key& key) const {
    const auto* line = find(kWindow, key);
    if (!line) { return std::nullopt; }
    const json record = json::parse(*line);
    return WindowRecord{DivergenceSum(blocks_from(record.at("blocks"))), speed_from(record.at("speed"))};
}

std::optional<std::vector<Answer>> Ledger::retrieval(const Key& key) const {
    const auto* line = find(kRetrieval, key);
    if (!line) { return std::nullopt; }
    const json record = json::parse(*line);
    std::vector<Answer> answers;
    for (const json& a : record.at("answers")) { answers.push_back({a.at("depth"), a.at("right"), a.at("nll")}); }
    return answers;
}

std::optional<TrajectoryRecord> Ledger::trajectory(const Key& key) const {
    const auto* line = find(kTrajectory, key);
    if (!line) { return std::nullopt; }
    const json record = json::parse(*line);
    TrajectoryRecord result{record.at("tokens"), {}, speed_from(record.at("speed"))};
    for (const char c : record.at("agrees").get<std::string>()) { result.agrees.push_back(c == '1'); }
    return result;
}

std::optional<std::vector<KeyShape>> Ledger::keys(const Key& key) const {
    const auto* line = find(kKeyShapes, key);
    if (!line) { return std::nullopt; }
    const json record = json::parse(*line);
    std::vector<KeyShape> shapes;
    for (const json& s : record.at("heads")) {
        shapes.push_back({s.at("layer"), s.at("head"), s.at("norm"), s.at("mean_share"), s.at("unevenness"), s.at("spectrum")});
    }
    return shapes;
}

void Ledger::add(const Key& key, const WindowRecord& r) {
    append(id_of(kWindow, json(key)),
           json{{"kind", kWindow}, {"key", key}, {"speed", speed_of(r.speed)}, {"blocks", blocks_of(r.divergence)}}.dump());
}

void Ledger::add(const Key& key, const std::vector<Answer>& answers) {
    json list = json::array();
    for (const Answer& a : answers) { list.push_back({{"depth", a.depth}, {"right", a.right}, {"nll", a.nll}}); }
    append(id_of(kRetrieval, json(key)), json{{"kind", kRetrieval}, {"key", key}, {"answers", std::move(list)}}.dump());
}

void Ledger::add(const Key& key, const TrajectoryRecord& r) {
    std::string agrees;
    for (const bool same : r.agrees) { agrees += same ? '1' : '0'; }
    append(id_of(kTrajectory, json(key)),
           json{{"kind", kTrajectory}, {"key", key}, {"speed", speed_of(r.speed)}, {"tokens", r.tokens}, {"agrees", agrees}}.dump());
}

void Ledger::add(const Key& key, const std::vector<KeyShape>& shapes) {
    json list = json::array();
    for (const KeyShape& s : shapes) {
        list.push_back({{"layer", s.layer}, {"head", s.head}, {"norm", s.norm}, {"mean_share", s.mean_share}, {"unevenness", s.unevenness}, {"spectrum", s.spectrum}});
    }
    append(id_of(kKeyShapes, json(key)), json{{"kind", kKeyShapes}, {"key", key}, {"heads", std::move(list)}}.dump());
}

}  // namespace crumb
