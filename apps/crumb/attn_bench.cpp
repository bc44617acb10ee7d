// crumb attn-bench: rounds, table, JSON and SVG. What is compared and how: docs/results/cpu.md.
#include "attn_bench.h"
#include "command_line.h"
#include "commands.h"
#include "session.h"

#include <crumb/error.h>

#include <nlohmann/json.hpp>

#include <unistd.h>

#include "base/whole_file.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

namespace crumb::app {

namespace {

using namespace attn;

constexpr int kMostHeads = 1024, kMostDim = 1024, kMostTokens = 1 << 24;

struct Options {
    std::string shape = "12/2x128", recipe = "had2", isa;
    std::vector<int> contexts = {2048, 8192};
    std::vector<std::string> opponents = ggml_names();
    int rows = 1, threads = 1, rounds = 9, megabytes = 64, layer = 0;
    int check = 8192;  // tokens up to which the answer is checked
    std::filesystem::path model, text, json, svg;
};

Shape parse_shape(const std::string& text) {
    Shape s;
    int end = 0;
    if (std::sscanf(text.c_str(), "%d/%dx%d%n", &s.n_head, &s.n_head_kv, &s.dim, &end) != 3 || end != int(text.size()) || s.n_head < 1 ||
        s.n_head > kMostHeads || s.n_head_kv < 1 || s.n_head % s.n_head_kv != 0 || s.dim < 1 || s.dim > kMostDim) {
        fail("'{}' is no shape: write query heads / KV heads x channels, as 12/2x128, with at most {} heads of {} channels", text, kMostHeads, kMostDim);
    }
    return s;
}

std::optional<Isa> find_isa(const std::string& text) {
    for (const Isa isa : kIsas) {
        if (text == name(isa)) { return isa; }
    }
    return std::nullopt;
}

Isa parse_isa(const std::string& text) {
    if (text.empty()) { return best_isa(); }
    if (const auto isa = find_isa(text); isa && supported(*isa)) { return *isa; }
    std::string names;
    for (const Isa isa : kIsas) {
        if (!supported(isa)) { continue; }
        names.append(names.empty() ? "" : ", ").append(name(isa));
    }
    fail("this CPU has no instruction set '{}': it has {}", text, names);
}

double median(std::vector<double> x) {
    std::ranges::sort(x);
    return x.empty() ? 0 : (x[(x.size() - 1) / 2] + x[x.size() / 2]) / 2;
}

struct Result {
    std::string name;
    double seconds = 0, ratio = 1, bytes = 0;  // medians; the ratio of a round's times to ours
};

struct Cell {
    int context = 0;
    std::vector<Result> results;  // ours first
    double error = -1, multiply_adds = 0, encode_share = 0;
};

Cell measure(const Options& o, const Rows& rows, int context, Isa isa) {
    const Task task{&rows, context + (o.rows > 1 ? o.rows : 0), o.rows, size_t(o.megabytes) << 20};
    std::vector<std::unique_ptr<Candidate>> candidates;
    candidates.push_back(std::make_unique<Ours>(task, o.recipe, isa));
    for (const std::string& opponent : o.opponents) {
        if (find_isa(opponent)) {
            candidates.push_back(std::make_unique<Ours>(task, o.recipe, parse_isa(opponent)));
            continue;
        }
        Task larger = task;  // the same number of layers as ours, or enough
        larger.bytes *= 2;
        candidates.push_back(ggml_candidate(larger, opponent));
    }
    std::vector<std::vector<double>> times(candidates.size()), ratios(candidates.size());
    for (int round = 0; round <= o.rounds; ++round) {  // the first warms up
        std::vector<double> t;
        for (const auto& candidate : candidates) { t.push_back(candidate->run(o.threads)); }
        for (size_t i = 0; round > 0 && i < t.size(); ++i) {
            times[i].push_back(t[i]);
            ratios[i].push_back(t[i] / t[0]);
        }
    }
    Cell cell{context, {}};
    for (size_t i = 0; i < candidates.size(); ++i) {
        cell.results.push_back({candidates[i]->name, median(times[i]), median(ratios[i]), double(candidates[i]->bytes())});
    }
    const auto& ours = static_cast<const Ours&>(*candidates[0]);
    if (context <= o.check) { cell.error = ours.error(std::min(o.rows, 4)); }
    const Shape& s = rows.shape;
    cell.multiply_adds = 2.0 * s.n_head * s.dim * (double(context) * o.rows + (o.rows > 1 ? o.rows * (o.rows + 1) / 2.0 : 0));
    // A step of `rows` tokens makes rows / 64 pages a KV head.
    cell.encode_share = ours.encode_seconds() * s.n_head_kv * o.rows / kPageTokens / (cell.results[0].seconds * o.threads);
    return cell;
}

// The least ratio among the candidates of a type, 0 if there is none.
double best_ratio(const Cell& cell, const std::string& type) {
    double best = 0;
    for (const Result& r : cell.results) {
        if (r.name.starts_with(type) && (best == 0 || r.ratio < best)) { best = r.ratio; }
    }
    return best;
}

void print(const Options& o, const Cell& cell, double read, double dot) {
    for (const Result& r : cell.results) {
        std::printf("| %7d | %-22s | %10.1f | %7.2f | %7.2f |\n", cell.context, r.name.c_str(), r.seconds * 1e6, r.bytes / r.seconds * 1e-9, r.ratio);
    }
    const Result& ours = cell.results[0];
    std::printf("          %.0f %% of the read roof, %.0f %% of the dot roof", 100 * ours.bytes / ours.seconds / read,
                dot > 0 ? 100 * cell.multiply_adds / ours.seconds / (dot * o.threads) : 0.0);
    if (cell.error >= 0) { std::printf(", error %.1e of the answer in double precision over the same pages", cell.error); }
    std::printf(", encoding adds %.1f %%; best f16 x%.1f, q8_0 x%.1f, q4_0 x%.1f\n", 100 * cell.encode_share, best_ratio(cell, "f16"),
                best_ratio(cell, "q8_0"), best_ratio(cell, "q4_0"));
    std::fflush(stdout);
}

// Rows of so many tokens must fit into this machine.
void require_memory(const Shape& s, int tokens) {
    const double bytes = 4.0 * tokens * s.dim * (s.n_head + 2.0 * s.n_head_kv), machine = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE));
    if (bytes > machine) {
        fail("K, V and Q of {} tokens of {} take {:.1f} GB, and this machine has {:.1f}: lower -c or --shape", tokens, s.name(), bytes * 1e-9, machine * 1e-9);
    }
}

void write_json(const Options& o, const Rows& rows, const std::vector<Cell>& cells, Isa isa, double read, double dot) {
    nlohmann::ordered_json j{{"shape", rows.shape.name()}, {"recipe", o.recipe}, {"isa", name(isa)}, {"threads", o.threads},
                             {"rows", o.rows}, {"rounds", o.rounds}, {"read_roof", read}, {"dot_roof", dot},
                             {"clock", o.threads == 1 ? "CPU time of the thread" : "wall clock"}};
    for (const Cell& cell : cells) {
        nlohmann::ordered_json c{{"context", cell.context}, {"error", cell.error}, {"encode_share", cell.encode_share}};
        for (const Result& r : cell.results) {
            c["candidates"].push_back({{"name", r.name}, {"seconds", r.seconds}, {"bytes", r.bytes}, {"ratio", r.ratio}});
        }
        j["cells"].push_back(c);
    }
    write_whole_file(o.json, j.dump(1) + '\n');
}

// Time a layer against the context, both logarithmic.
void write_svg(const Options& o, const Rows& rows, const std::vector<Cell>& cells) {
    constexpr double kWidth = 640, kHeight = 420, kLeft = 70, kRight = 170, kTop = 40, kBottom = 50;
    constexpr const char* kColours[] = {"#c0392b", "#2c3e50", "#2980b9", "#16a085", "#8e44ad", "#d35400", "#7f8c8d", "#27ae60"};
    double x0 = INFINITY, x1 = 0, y0 = INFINITY, y1 = 0;
    for (const Cell& cell : cells) {
        x0 = std::min(x0, double(cell.context)), x1 = std::max(x1, double(cell.context));
        for (const Result& r : cell.results) { y0 = std::min(y0, r.seconds), y1 = std::max(y1, r.seconds); }
    }
    x1 = std::max(x1, 2 * x0);
    const auto x = [&](double v) { return kLeft + (kWidth - kLeft - kRight) * std::log(v / x0) / std::log(x1 / x0); };
    const auto y = [&](double v) { return kTop + (kHeight - kTop - kBottom) * (1 - std::log(v / y0) / std::log(y1 / y0)); };
    std::string out = fmt::format("<svg xmlns='http://www.w3.org/2000/svg' width='{}' height='{}' font-family='sans-serif' font-size='12'>\n"
                       "<rect width='100%' height='100%' fill='white'/>\n<text x='{}' y='22' font-size='14'>One attention layer, {}, {} of {}, {} thread{}</text>\n",
                       kWidth, kHeight, kLeft, rows.shape.name(), o.rows == 1 ? "decode" : "prefill", o.rows == 1 ? "1 token" : fmt::format("{} tokens", o.rows),
                       o.threads, o.threads == 1 ? "" : "s");
    for (double t = std::pow(10, std::floor(std::log10(y0))); t <= y1; t *= 10) {
        if (t < y0) { continue; }
        out += fmt::format("<line x1='{}' x2='{}' y1='{:.1f}' y2='{:.1f}' stroke='#ddd'/><text x='{}' y='{:.1f}' text-anchor='end'>{:g} us</text>\n", kLeft,
                           kWidth - kRight, y(t), y(t), kLeft - 6, y(t) + 4, t * 1e6);
    }
    for (const Cell& cell : cells) {
        out += fmt::format("<text x='{:.1f}' y='{}' text-anchor='middle'>{}</text>\n", x(cell.context), kHeight - kBottom + 18, cell.context);
    }
    out += fmt::format("<text x='{}' y='{}' text-anchor='middle'>tokens of context</text>\n", (kLeft + kWidth - kRight) / 2, kHeight - 12);
    for (size_t i = 0; i < cells[0].results.size(); ++i) {
        const char* colour = kColours[i % std::size(kColours)];
        std::string points;
        for (const Cell& cell : cells) { points += fmt::format("{:.1f},{:.1f} ", x(cell.context), y(cell.results[i].seconds)); }
        out += fmt::format("<polyline points='{}' fill='none' stroke='{}' stroke-width='{}'/><text x='{}' y='{:.1f}' fill='{}'>{}</text>\n", points, colour,
                           i == 0 ? 3 : 1.5, kWidth - kRight + 8, kTop + 14.0 * double(i) + 10, colour, cells[0].results[i].name);
    }
    write_whole_file(o.svg, out + "</svg>\n");
}

}  // namespace

int attn_bench(int argc, char** argv) {
    CLI::App app{"Time of one attention layer over its KV cache, against ggml's in the same process", "crumb attn-bench"};
    Options o;
    app.add_option("--shape", o.shape, "query heads / KV heads x channels")->capture_default_str();
    app.add_option("-c,--ctx-size", o.contexts, "tokens of context, several with commas")->delimiter(',')->capture_default_str()->check(CLI::Range(1, kMostTokens));
    app.add_option("--rows", o.rows, "query tokens after the context; 1: decode")->capture_default_str()->check(CLI::Range(1, 4096));
    app.add_option("--kv", o.recipe, "recipe that needs no artefact")->capture_default_str();
    app.add_option("--isa", o.isa, "instruction set of ours (default: the best of this CPU)");
    app.add_option("--against", o.opponents, "ggml's, or ours with an instruction set, with commas; none: ours alone")->delimiter(',')->capture_default_str();
    add_threads(app, o.threads, "threads; 1 is timed by its CPU time, more by the wall clock");
    app.add_option("-r,--rounds", o.rounds, "rounds; in each all candidates take turns")->capture_default_str()->check(CLI::Range(1, 1000));
    app.add_option("--megabytes", o.megabytes, "memory of ours, in layers that are read in turn; ggml's gets twice as much")->capture_default_str()->check(CLI::Range(1, 1 << 20));
    app.add_option("--check", o.check, "largest context at which the answer is checked in double precision")->capture_default_str()->check(CLI::Range(0, kMostTokens));
    auto* model = app.add_option("-m,--model", o.model, "record K, V and Q from this GGUF model instead of random ones");
    auto* text = app.add_option("-f,--file", o.text, "the text that it reads");
    app.add_option("--layer", o.layer, "which of its layers")->capture_default_str()->check(CLI::Range(0, 1 << 16));
    app.add_option("--json", o.json, "write the figures here");
    app.add_option("--svg", o.svg, "write a plot here");
    model->needs(text);
    text->needs(model);
    if (const auto status = parse(app, {argv, argv + argc})) { return *status; }
    std::erase(o.opponents, "none");
    require_different({{"--json", o.json}, {"--svg", o.svg}});
    if (!o.json.empty()) { require_replaceable(o.json, 0, "{", "a table of figures (JSON)"); }
    if (!o.svg.empty()) { require_replaceable(o.svg, 0, "<svg", "a plot (SVG)"); }
    llama::quiet_log();

    const Isa isa = parse_isa(o.isa);
    const int tokens = *std::ranges::max_element(o.contexts) + o.rows;
    const Shape shape = parse_shape(o.shape);
    if (o.model.empty()) { require_memory(shape, tokens); }
    const Rows rows = o.model.empty() ? random_rows(shape, tokens) : record_rows(o.model, o.text, o.layer, tokens, o.threads);
    const double read = read_roof(o.threads), dot = dot_roof(isa);
    std::printf("%s, %s, rows %d, threads %d, rounds %d; roofs: read %.1f GB/s, %s dot products %.0f G multiply-adds/s a thread\n\n"
                "| context | candidate              | us a layer |    GB/s | x ours  |\n|---|---|---|---|---|\n",
                rows.shape.name().c_str(), o.model.empty() ? "random rows" : "recorded rows", o.rows, o.threads, o.rounds, read * 1e-9, name(isa), dot * 1e-9);
    std::vector<Cell> cells;
    for (const int context : o.contexts) {
        cells.push_back(measure(o, rows, context, isa));
        print(o, cells.back(), read, dot);
    }
    if (!o.json.empty()) { write_json(o, rows, cells, isa, read, dot); }
    if (!o.svg.empty()) { write_svg(o, rows, cells); }
    return 0;
}

}  // namespace crumb::app
