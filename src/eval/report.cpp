#include "eval/report.h"

#include "eval/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

namespace crumb {

namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #626a73; --line: #dde1e6; --paper: #fff; --accent: #0b62c4; --other: #8a939d; --warm: #c2520a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #9aa3ad; --line: #343a41; --paper: #15181c; --accent: #69aefc; --other: #7d8792; --warm: #f09a52; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 78rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p, li { max-width: 44rem; } .soft, figcaption { color: var(--soft); font-size: .9rem; }
ul { padding-left: 1.2rem; } li { overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1.2rem; }
figure { margin: .6rem 0; max-width: 36rem; } svg { width: 100%; height: auto; display: block; }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; margin-top: .6rem; } .wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .45rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
td small { color: var(--soft); } tr.front td:first-child { color: var(--accent); font-weight: 600; } tr.base td { color: var(--soft); }
.grid { stroke: var(--line); } .tick, .axis { fill: var(--soft); font-size: 10px; } .label, .cell { fill: var(--ink); font-size: 10px; }
.mid { text-anchor: middle; } .end { text-anchor: end; }
.first { fill: var(--accent); } .second { fill: var(--warm); } .other { fill: var(--other); } .label.first { font-weight: 600; }
polyline.first, polyline.second, polyline.other { fill: none; stroke-width: 1.6; } polyline.first, line.first { stroke: var(--accent); }
polyline.second, line.second { stroke: var(--warm); } polyline.other, line.other { stroke: var(--other); } .heat { fill: var(--accent); } .empty { fill: var(--line); } .cell.full { fill: var(--paper); }
)";

std::string value_cell(const Figure& f, int digits, double scale = 1) {
    if (std::isnan(f.error)) { return fmt::format("{:.{}f}", f.value * scale, digits); }
    return fmt::format("{:.{}f} <small>± {:.{}f}</small>", f.value * scale, digits, f.error * scale, digits);
}

// The same without markup, for what a pointer over a mark shows.
std::string value_text(const Figure& f, int digits) {
    return std::isnan(f.error) ? fmt::format("{:.{}f}", f.value, digits) : fmt::format("{:.{}f} ± {:.{}f}", f.value, digits, f.error, digits);
}

std::string table(const std::vector<std::string>& head, const std::vector<std::pair<std::string, std::vector<std::string>>>& rows) {
    std::string text = "<div class=\"wide\"><table><thead><tr>";
    for (const auto& cell : head) { text += "<th>" + cell + "</th>"; }
    text += "</tr></thead><tbody>\n";
    for (const auto& [css, cells] : rows) {
        text += css.empty() ? "<tr>" : "<tr class=\"" + css + "\">";
        for (const auto& cell : cells) { text += "<td>" + cell + "</td>"; }
        text += "</tr>\n";
    }
    return text + "</tbody></table></div>\n";
}

std::string figure(const std::string& svg, const std::string& caption) {
    return "<figure>" + svg + "<figcaption>" + escaped(caption) + "</figcaption></figure>\n";
}

bool is_base(const Row& row) { return row.recipe == "16 bit"; }

std::string quality_plot(const std::vector<const Row*>& rows, const std::string& text, int context) {
    std::vector<double> bits, losses;
    for (const Row* row : rows) {
        bits.push_back(row->cost.effective_bits);
        losses.push_back(row->divergence.mean_kld.value);
    }
    Plot plot(fmt::format("Mean KLD against bits, {} at {} tokens", text, context), axis_around("bits an element at this context", bits, true),
              axis_around("Mean KLD, nats a token", losses, true), 300);
    std::vector<const Row*> front;
    for (const Row* row : rows) {
        if (row->front) { front.push_back(row); }
    }
    std::ranges::sort(front, {}, [](const Row* row) { return row->cost.effective_bits; });
    // Steps: what a budget of so many bits can have.
    std::vector<std::pair<double, double>> steps;
    for (const Row* row : front) {
        if (!steps.empty()) { steps.emplace_back(row->cost.effective_bits, steps.back().second); }
        steps.emplace_back(row->cost.effective_bits, row->divergence.mean_kld.value);
    }
    plot.line(steps, "first");
    const auto place = [](const Row* row) { return std::pair(row->cost.effective_bits, row->divergence.mean_kld.value); };
    const auto css = [](const Row* row) { return row->front ? "first" : "other"; };
    for (const Row* row : rows) {
        const Figure& kld = row->divergence.mean_kld;
        if (!std::isnan(kld.error)) { plot.error_bar(row->cost.effective_bits, kld.value - kld.error, kld.value + kld.error, css(row)); }
        plot.point(place(row).first, place(row).second, css(row),
                   fmt::format("{}: Mean KLD {} at {:.3f} bits ({:.3f} in a page), {:.1f} tokens/s", row->recipe, value_text(kld, 5), row->cost.effective_bits, row->cost.bits, row->speed.generated));
    }
    for (const bool of_front : {true, false}) {
        for (const Row* row : rows) {
            if (row->front == of_front) { plot.label(place(row).first, place(row).second, row->recipe, css(row)); }
        }
    }
    return plot.svg();
}

std::string quality_section(const Verdict& v) {
    if (v.rows.empty()) { return ""; }
    std::string text = "<h2>Quality for bits</h2>\n<div class=\"plots\">";
    std::vector<std::pair<std::string, int>> groups;  // text, context
    for (const Row& row : v.rows) {
        const std::pair group(row.text, row.context);
        if (std::ranges::find(groups, group) == groups.end()) { groups.push_back(group); }
    }
    const bool several = std::ranges::any_of(groups, [](const auto& g) { return g.first == "all"; });
    for (const auto& [name, context] : groups) {
        if (several && name != "all") { continue; }
        std::vector<const Row*> rows;
        for (const Row& row : v.rows) {
            if (row.text == name && row.context == context && !is_base(row)) { rows.push_back(&row); }
        }
        text += figure(quality_plot(rows, name, context), fmt::format("{} tokens, {}. Lower and further left is better; the line joins what no other recipe beats in both.",
                                                                      context, name == "all" ? "all texts" : name));
    }
    text += "</div>\n";
    std::vector<std::pair<std::string, std::vector<std::string>>> main, by_text;
    for (const Row& row : v.rows) {
        const Divergence& d = row.divergence;
        const bool base = is_base(row);
        auto& lines = several && row.text != "all" ? by_text : main;
        lines.push_back({base ? "base" : row.front ? "front" : "",
                         {escaped(row.recipe), escaped(row.text) + (row.calibrated_on.value_or(0) > 0 ? " !" : ""), std::to_string(row.context), fmt::format("{:.3f}", row.cost.bits),
                          fmt::format("{:.3f}", row.cost.effective_bits), fmt::format("{:.1f}", double(row.cost.bytes) / 1048576), base ? "0" : value_cell(d.mean_kld, 5),
                          base ? "" : value_cell(d.kld_90, 4), base ? "" : value_cell(d.kld_99, 3), base ? "" : value_cell(d.kld_999, 2),
                          base ? fmt::format("PPL {:.3f}", d.ppl_base) : value_cell(d.ppl_ratio, 4), base ? "100" : value_cell(d.same_top, 2, 100),
                          fmt::format("{:.1f}", row.speed.prompt), fmt::format("{:.1f}", row.speed.generated)}});
    }
    const std::vector<std::string> head = {"recipe", "text", "context", "bits in<br/>a page", "bits at<br/>context", "MiB", "Mean KLD", "90%<br/>KLD", "99%<br/>KLD", "99.9%<br/>KLD",
                                           "PPL(Q)/<br/>PPL(base)", "Same<br/>top p %", "pp<br/>t/s", "tg<br/>t/s"};
    text += table(head, main);
    return by_text.empty() ? text : text + "<details><summary>Each text</summary>\n" + table(head, by_text) + "</details>\n";
}

std::string parts_section(const Verdict& v) {
    if (v.parts.empty()) { return ""; }
    std::string text = "<h2>Where the error comes from</h2>\n<div class=\"plots\">";
    std::vector<std::string> recipes;
    for (const PartRow& row : v.parts) {
        if (std::ranges::find(recipes, row.recipe) == recipes.end()) { recipes.push_back(row.recipe); }
    }
    std::vector<std::pair<std::string, std::vector<std::string>>> lines;
    for (const auto& recipe : recipes) {
        std::vector<double> values;
        double last = 0;
        for (const PartRow& row : v.parts) {
            if (row.recipe != recipe) { continue; }
            if (row.layer < 0) {
                lines.push_back({"", {escaped(recipe), escaped(row.part), value_cell(row.divergence.mean_kld, 5), value_cell(row.divergence.kld_99, 3), value_cell(row.divergence.same_top, 2, 100)}});
            } else {
                values.push_back(row.divergence.mean_kld.value);
                last = std::max(last, double(row.layer));
            }
        }
        if (values.empty()) { continue; }
        Plot plot("Mean KLD by layer, " + recipe, {"layer", 0, last + 1, false}, axis_around("Mean KLD, only this layer coded", values, false), 230);
        for (const PartRow& row : v.parts) {
            if (row.recipe != recipe || row.layer < 0) { continue; }
            const bool v_side = row.part == "V";
            const double from = row.layer + (v_side ? 0.5 : 0.08), to = row.layer + (v_side ? 0.92 : row.part == "K" ? 0.5 : 0.92);
            plot.bar(from, to, row.divergence.mean_kld.value, v_side ? "second" : "first",
                     fmt::format("layer {}, {}: {}", row.layer, row.part, value_text(row.divergence.mean_kld, 6)));
        }
        const bool sides = std::ranges::any_of(v.parts, [&](const PartRow& row) { return row.recipe == recipe && row.part == "V"; });
        text += figure(plot.svg(), recipe + ": one layer coded, all others 16 bit." + (sides ? " Blue: K alone, orange: V alone." : ""));
    }
    text += "</div>\n";
    return lines.empty() ? text : text + table({"recipe", "part", "Mean KLD", "99% KLD", "Same top p %"}, lines);
}

std::string retrieval_section(const Verdict& v) {
    if (v.retrieval.empty()) { return ""; }
    std::string text = "<h2>Retrieval</h2>\n<p class=\"soft\">Per cent of questions whose answer has every token on top, by the depth of the fact in the text; right: all depths, one standard error.</p>\n<div class=\"plots\">";
    std::vector<std::pair<std::string, int>> groups;
    for (const RetrievalRow& row : v.retrieval) {
        const std::pair group(row.probe, row.context);
        if (std::ranges::find(groups, group) == groups.end()) { groups.push_back(group); }
    }
    std::vector<std::string> columns;
    for (int bin = 0; bin < kDepthBins; ++bin) { columns.push_back(fmt::format("{:.0f}%", 100.0 * (bin + 0.5) / kDepthBins)); }
    for (const auto& [probe, context] : groups) {
        std::vector<HeatRow> rows;
        size_t asked = 0;
        for (const RetrievalRow& row : v.retrieval) {
            if (row.probe != probe || row.context != context) { continue; }
            HeatRow heat{row.recipe == "16 bit" ? row.recipe : fmt::format("{} {:.2f}", row.recipe, row.cost.effective_bits), {}, fmt::format("{:.1f} ± {:.1f}", 100 * row.all.value(), 100 * row.all.error())};
            for (const Share& share : row.by_depth) { heat.shares.push_back(share.asked ? share.value() : -1); }
            rows.push_back(std::move(heat));
            asked = row.all.asked;
        }
        text += figure(heat_map(fmt::format("{} at {} tokens", probe, context), columns, rows), fmt::format("{} at {} tokens, {} questions; behind a recipe its bits at this context", probe, context, asked));
    }
    return text + "</div>\n";
}

std::string trajectory_section(const Verdict& v) {
    if (v.trajectories.empty()) { return ""; }
    std::vector<std::pair<std::string, std::vector<std::string>>> lines;
    for (const TrajectoryRow& row : v.trajectories) {
        lines.push_back({row.recipe == "16 bit" ? "base" : "", {escaped(row.recipe), escaped(row.text), std::to_string(row.context), fmt::format("{:.3f}", row.cost.effective_bits), std::to_string(row.generated),
                                                                row.first_divergence == row.generated ? "none" : std::to_string(row.first_divergence + 1), fmt::format("{:.1f}", 100 * row.agreement),
                                                                fmt::format("{:.1f}", row.speed.generated)}});
    }
    return "<h2>Greedy text</h2>\n<p class=\"soft\">Along the text that 16 bit generates: the first token that the recipe would have chosen otherwise, and the share on which both agree.</p>\n" +
           table({"recipe", "text", "context", "bits at context", "tokens", "first divergence", "agreement %", "tg t/s"}, lines);
}

std::string keys_section(const Verdict& v) {
    if (v.keys.empty()) { return ""; }
    std::map<int, KeyShape> worst;  // by layer: of its heads the one with the largest value
    std::vector<double> norms, shares, uneven;
    double last = 0;
    for (const KeyShape& k : v.keys) {
        auto& w = worst[k.layer];
        w.norm = std::max(w.norm, k.norm);
        w.mean_share = std::max(w.mean_share, k.mean_share);
        w.unevenness = std::max(w.unevenness, k.unevenness);
        last = std::max(last, double(k.layer));
    }
    for (const auto& [layer, k] : worst) {
        norms.push_back(k.norm);
        shares.push_back(100 * k.mean_share);
        uneven.push_back(k.unevenness);
    }
    const Axis layers{"layer", 0, last + 1, false};
    Plot mean("Share of the mean key by layer", layers, axis_around("mean key, % of squared length", shares, false), 200);
    Plot norm("Length of keys by layer", layers, axis_around("rms length of a key", norms, false), 200);
    Plot spread("Unevenness of the key spectrum by layer", layers, axis_around("arithmetic / geometric mean", uneven, false), 200);
    for (const auto& [layer, k] : worst) {
        mean.bar(layer + 0.1, layer + 0.9, 100 * k.mean_share, "first", fmt::format("layer {}: {:.1f} %", layer, 100 * k.mean_share));
        norm.bar(layer + 0.1, layer + 0.9, k.norm, "first", fmt::format("layer {}: {:.2f}", layer, k.norm));
        spread.bar(layer + 0.1, layer + 0.9, k.unevenness, "first", fmt::format("layer {}: {:.2f}", layer, k.unevenness));
    }
    std::vector<const KeyShape*> order;
    for (const KeyShape& k : v.keys) {
        if (!k.spectrum.empty()) { order.push_back(&k); }
    }
    std::ranges::sort(order, {}, [](const KeyShape* k) { return k->unevenness; });
    std::string text =
        "<h2>Why this model is hard, or is not</h2>\n<p class=\"soft\">Keys of 16 bit. A large mean (a key bias) wastes the range of every token until it is removed; "
        "an uneven spectrum is what unequal widths can win, and equal ones lose. Of each layer the head with the largest value.</p>\n<div class=\"plots\">";
    text += figure(mean.svg(), "The constant part of the keys.") + figure(norm.svg(), "Key norms.") + figure(spread.svg(), "1: all directions carry the same energy.");
    if (!order.empty()) {
        std::vector<double> all;
        const std::pair<const KeyShape*, const char*> shown[] = {{order.front(), "other"}, {order[order.size() / 2], "first"}, {order.back(), "second"}};
        for (const auto& [k, css] : shown) { all.insert(all.end(), k->spectrum.begin(), k->spectrum.end()); }
        Plot spectra("Key spectra", {"direction, largest first", 0, double(order.back()->spectrum.size()), false}, axis_around("variance over its average", all, true), 230);
        for (const auto& [k, css] : shown) {
            std::vector<std::pair<double, double>> points;
            for (size_t i = 0; i < k->spectrum.size(); ++i) { points.emplace_back(double(i) + 0.5, k->spectrum[i]); }
            spectra.line(points, css);
        }
        text += figure(spectra.svg(), fmt::format("Spectra of keys less their mean: grey the most even head (layer {}, head {}), blue the median (layer {}, head {}), orange the most uneven (layer {}, head {}).",
                                                  shown[0].first->layer, shown[0].first->head, shown[1].first->layer, shown[1].first->head, shown[2].first->layer, shown[2].first->head));
    }
    return text + "</div>\n";
}

// The front in one sentence a context, best quality last.
std::string summary(const Verdict& v) {
    std::string text;
    const bool several = std::ranges::any_of(v.rows, [](const Row& r) { return r.text == "all"; });
    std::map<int, std::vector<const Row*>> fronts;
    for (const Row& row : v.rows) {
        if (row.front && (!several || row.text == "all")) { fronts[row.context].push_back(&row); }
    }
    for (auto& [context, rows] : fronts) {
        std::ranges::sort(rows, {}, [](const Row* r) { return r->cost.effective_bits; });
        text += fmt::format("<p>At {} tokens no recipe beats ", context);
        for (size_t i = 0; i < rows.size(); ++i) {
            const Row& r = *rows[i];
            text += fmt::format("{}<b>{}</b> ({:.2f} bits, {:.1f} times smaller than 16 bit, Mean KLD {:.4f}, same top token {:.1f} %)", i == 0 ? "" : i + 1 == rows.size() ? " and " : ", ", escaped(r.recipe),
                                r.cost.effective_bits, double(r.cost.bytes_16bit) / double(std::max<size_t>(1, r.cost.bytes)), r.divergence.mean_kld.value, 100 * r.divergence.same_top.value);
        }
        text += " in both bits and divergence.</p>\n";
    }
    return text;
}

std::string list(const std::vector<std::string>& lines) {
    std::string text = "<ul>";
    for (const auto& line : lines) { text += "<li>" + escaped(line) + "</li>\n"; }
    return text + "</ul>\n";
}

}  // namespace

std::string page(const Verdict& v) {
    std::string text =
        "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n<meta charset=\"utf-8\"/>\n"
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n";
    text += "<title>" + escaped(v.model) + ": KV cache recipes</title>\n<style>" + kStyle + "</style>\n</head>\n<body>\n";
    text += "<h1>" + escaped(v.model) + "</h1>\n<p class=\"soft\">What a smaller KV cache does to this model, measured on it by crumb eval.</p>\n";
    text += summary(v);
    text += quality_section(v) + parts_section(v) + retrieval_section(v) + trajectory_section(v) + keys_section(v);
    if (!v.notes.empty()) { text += "<h2>Beware</h2>\n" + list(v.notes); }
    text += "<h2>Setting</h2>\n" + list(v.setting);
    return text + "</body>\n</html>\n";
}

}  // namespace crumb
