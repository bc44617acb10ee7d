#include "eval/verdict.h"

#include "base/json_text.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

namespace crumb {

namespace {

using nlohmann::ordered_json;

std::string with_error(const Figure& f, int digits, double scale = 1) {
    if (std::isnan(f.error)) { return fmt::format("{:.{}f}", f.value * scale, digits); }
    return fmt::format("{:.{}f} ± {:.{}f}", f.value * scale, digits, f.error * scale, digits);
}

// Not bytes: "±" is one.
size_t characters(const std::string& text) {
    return size_t(std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

// A table whose columns are as wide as what is in them; the first column to the left.
std::string table(const std::vector<std::vector<std::string>>& lines) {
    std::vector<size_t> width;
    for (const auto& line : lines) {
        width.resize(std::max(width.size(), line.size()));
        for (size_t i = 0; i < line.size(); ++i) { width[i] = std::max(width[i], characters(line[i])); }
    }
    std::string text;
    for (size_t n = 0; n < lines.size(); ++n) {
        for (size_t i = 0; i < lines[n].size(); ++i) {
            const std::string space(width[i] - characters(lines[n][i]), ' ');
            text += i ? " | " + space + lines[n][i] : "| " + lines[n][i] + space;
        }
        text += " |\n";
        if (n == 0) {
            for (size_t i = 0; i < width.size(); ++i) { text += i ? "|" + std::string(width[i] + 1, '-') + ":" : "|" + std::string(width[i] + 2, '-'); }
            text += "|\n";
        }
    }
    return text;
}

std::string mib(size_t bytes) { return fmt::format("{:.1f}", double(bytes) / 1048576.0); }

std::string quality_table(const Verdict& v) {
    std::vector<std::vector<std::string>> lines = {{"recipe", "text", "context", "bits", "at context", "MiB", "Mean KLD", "90%", "99%", "99.9%",
                                                    "PPL(Q)/PPL(base)", "Same top p %", "pp t/s", "tg t/s"}};
    for (const Row& row : v.rows) {
        const Divergence& d = row.divergence;
        const bool base = row.recipe == "16 bit";
        lines.push_back({row.recipe + (row.front ? " *" : "") + (row.calibrated_on.value_or(0) > 0 ? " !" : ""), row.text,
                         std::to_string(row.context), fmt::format("{:.3f}", row.cost.bits), fmt::format("{:.3f}", row.cost.effective_bits),
                         mib(row.cost.bytes), base ? "0" : with_error(d.mean_kld, 5), base ? "" : with_error(d.kld_90, 4),
                         base ? "" : with_error(d.kld_99, 3), base ? "" : with_error(d.kld_999, 2),
                         base ? fmt::format("PPL {:.4f}", d.ppl_base) : with_error(d.ppl_ratio, 4), base ? "100" : with_error(d.same_top, 2, 100),
                         fmt::format("{:.1f}", row.speed.prompt), fmt::format("{:.1f}", row.speed.generated)});
    }
    return table(lines) + "* no other recipe has both fewer bits at this context and a smaller Mean KLD (Pareto front)\n";
}

std::string retrieval_table(const Verdict& v) {
    std::vector<std::vector<std::string>> lines = {{"retrieval", "probe", "context", "at context", "asked", "exact %", "nats a token"}};
    for (int bin = 0; bin < kDepthBins; ++bin) { lines[0].push_back(fmt::format("{:.0f}%", 100.0 * (bin + 0.5) / kDepthBins)); }
    for (const RetrievalRow& row : v.retrieval) {
        lines.push_back({row.recipe, row.probe, std::to_string(row.context), fmt::format("{:.3f}", row.cost.effective_bits), std::to_string(row.all.asked),
                         with_error({row.all.value(), row.all.error()}, 1, 100), fmt::format("{:.3f}", row.all.nll / double(std::max<size_t>(1, row.all.asked)))});
        for (const Share& share : row.by_depth) { lines.back().push_back(share.asked ? fmt::format("{:.0f}", 100 * share.value()) : "-"); }
    }
    return table(lines);
}

std::string trajectory_table(const Verdict& v) {
    std::vector<std::vector<std::string>> lines = {{"greedy text", "text", "context", "at context", "tokens", "first divergence", "agreement %", "tg t/s"}};
    for (const TrajectoryRow& row : v.trajectories) {
        lines.push_back({row.recipe, row.text, std::to_string(row.context), fmt::format("{:.3f}", row.cost.effective_bits), std::to_string(row.generated),
                         row.first_divergence == row.generated ? "none" : std::to_string(row.first_divergence + 1), fmt::format("{:.1f}", 100 * row.agreement),
                         fmt::format("{:.1f}", row.speed.generated)});
    }
    return table(lines);
}

std::string parts_table(const Verdict& v) {
    std::vector<std::vector<std::string>> lines = {{"parts of", "part", "layer", "Mean KLD", "99%", "Same top p %"}};
    for (const PartRow& row : v.parts) {
        const Divergence& d = row.divergence;
        lines.push_back({row.recipe, row.part, row.layer < 0 ? "all" : std::to_string(row.layer), with_error(d.mean_kld, 5), with_error(d.kld_99, 3),
                         with_error(d.same_top, 2, 100)});
    }
    return table(lines);
}

ordered_json number(double x) { return std::isfinite(x) ? ordered_json(x) : ordered_json(nullptr); }

void put(ordered_json& row, const char* name, const Figure& f) {
    row[name] = number(f.value);
    row[std::string(name) + "_error"] = number(f.error);
}

void put(ordered_json& row, const Cost& cost) {
    row["bits_per_element"] = cost.bits;
    row["effective_bits"] = cost.effective_bits;
    row["bytes"] = cost.bytes;
    row["bytes_16bit"] = cost.bytes_16bit;
}

void put(ordered_json& row, const Divergence& d) {
    row["positions"] = d.positions;
    row["blocks"] = d.blocks;
    put(row, "mean_kld", d.mean_kld);
    put(row, "kld_90", d.kld_90);
    put(row, "kld_99", d.kld_99);
    put(row, "kld_99.9", d.kld_999);
    row["median_kld"] = d.median_kld;
    row["max_kld"] = d.max_kld;
    row["ppl"] = d.ppl;
    row["ppl_base"] = d.ppl_base;
    put(row, "ppl_ratio", d.ppl_ratio);
    put(row, "same_top_p", d.same_top);
}

}  // namespace

double Share::error() const {
    const double p = value();
    return asked > 1 ? std::sqrt(p * (1 - p) / double(asked - 1)) : std::nan("");
}

void Share::add(const Answer& answer) {
    ++asked;
    right += answer.right;
    nll += answer.nll;
}

void mark_fronts(std::vector<Row>& rows) {
    std::set<std::tuple<std::string, int>> groups;
    for (const Row& row : rows) { groups.emplace(row.text, row.context); }
    for (const auto& [text, context] : groups) {
        std::vector<RateLoss> points;
        std::vector<Row*> members;
        for (Row& row : rows) {
            if (row.text != text || row.context != context || row.recipe == "16 bit") { continue; }
            points.push_back({row.cost.effective_bits, row.divergence.mean_kld.value});
            members.push_back(&row);
        }
        for (const size_t i : pareto_front(points)) { members[i]->front = true; }
    }
}

std::string terminal(const Verdict& v) {
    std::string text = v.model + "\n";
    for (const auto& line : v.setting) { text += line + "\n"; }
    if (!v.rows.empty()) { text += "\n" + quality_table(v); }
    if (!v.parts.empty()) { text += "\n" + parts_table(v); }
    if (!v.retrieval.empty()) { text += "\n" + retrieval_table(v); }
    if (!v.trajectories.empty()) { text += "\n" + trajectory_table(v); }
    if (!v.notes.empty()) { text += "\n"; }
    for (const auto& note : v.notes) { text += note + "\n"; }
    return text;
}

std::string json_lines(const Verdict& v) {
    std::string lines;
    const auto add = [&](const ordered_json& row) { lines += json_text(row) + "\n"; };
    add({{"kind", "run"}, {"model", v.model}, {"setting", v.setting}, {"notes", v.notes}});
    for (const Row& r : v.rows) {
        ordered_json row = {{"kind", "quality"}, {"recipe", r.recipe}, {"text", r.text}, {"context", r.context}};
        put(row, r.cost);
        put(row, r.divergence);
        row["pp"] = r.speed.prompt;
        row["tg"] = r.speed.generated;
        row["calibrated_on"] = r.calibrated_on ? ordered_json(*r.calibrated_on) : ordered_json(nullptr);
        row["pareto"] = r.front;
        add(row);
    }
    for (const PartRow& r : v.parts) {
        ordered_json row = {{"kind", "part"}, {"recipe", r.recipe}, {"part", r.part}, {"layer", r.layer}, {"context", r.context}};
        put(row, r.divergence);
        add(row);
    }
    for (const RetrievalRow& r : v.retrieval) {
        ordered_json row = {{"kind", "retrieval"}, {"recipe", r.recipe}, {"probe", r.probe}, {"context", r.context}};
        put(row, r.cost);
        row["asked"] = r.all.asked;
        put(row, "exact", Figure{r.all.value(), r.all.error()});
        row["nll"] = r.all.nll / double(std::max<size_t>(1, r.all.asked));
        for (const Share& share : r.by_depth) { row["asked_by_depth"].push_back(share.asked), row["right_by_depth"].push_back(share.right); }
        add(row);
    }
    for (const TrajectoryRow& r : v.trajectories) {
        ordered_json row = {{"kind", "trajectory"}, {"recipe", r.recipe}, {"text", r.text}, {"context", r.context}};
        put(row, r.cost);
        row["tokens"] = r.generated;
        row["first_divergence"] = r.first_divergence;
        row["agreement"] = r.agreement;
        row["tg"] = r.speed.generated;
        add(row);
    }
    for (const KeyShape& k : v.keys) {
        add({{"kind", "keys"}, {"layer", k.layer}, {"head", k.head}, {"norm", k.norm}, {"mean_share", k.mean_share}, {"unevenness", k.unevenness}});
    }
    return lines;
}

}  // namespace crumb
