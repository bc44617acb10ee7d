// What crumb eval found, ready to be shown: a terminal table, JSON lines, one HTML page (report.h). Quality, bits, bytes and
// speed stand in one row, so that no figure is read without the others.
#pragma once

#include "eval/ledger.h"

#include <optional>
#include <string>
#include <vector>

namespace crumb {

// What a recipe costs at a context: from the page formats and the cache's plan.
struct Cost {
    double bits = 16;            // an element in a page, side information included
    double effective_bits = 16;  // an element at this context, windows included
    size_t bytes = 0;
    size_t bytes_16bit = 0;
};

struct Row {
    std::string recipe, text;  // text "all": of all texts together
    int context = 0;
    Cost cost;
    Speed speed;
    Divergence divergence;                // of 16 bit: from itself
    std::optional<double> calibrated_on;  // share of the text that the recipe's artefact was calibrated on; unknown, or none used
    bool front = false;                   // on the Pareto front of effective bits and Mean KLD, of its text and context
};

// Counted answers; the error is that of a share of independent questions.
struct Share {
    size_t asked = 0;
    size_t right = 0;
    double nll = 0;  // sum over questions
    double value() const { return asked ? double(right) / double(asked) : 0; }
    double error() const;
    void add(const Answer& answer);
};

inline constexpr int kDepthBins = 8;

struct RetrievalRow {
    std::string recipe, probe;
    int context = 0;
    Cost cost;
    Share all;
    Share by_depth[kDepthBins];
};

struct TrajectoryRow {
    std::string recipe, text;
    int context = 0;
    Cost cost;
    Speed speed;
    size_t generated = 0;
    size_t first_divergence = 0;  // tokens before it; `generated` if there is none
    double agreement = 0;         // share of tokens that the recipe would have chosen as well, along the 16-bit text
};

// One part of the model's KV coded and the rest left at 16 bit, or one stage of a recipe left out.
struct PartRow {
    std::string recipe, part;  // part: "K", "V", "K and V", "no sinks", ...
    int layer = -1;            // -1: all layers
    int context = 0;
    Divergence divergence;
};

struct Verdict {
    std::string model;                // name, for people
    std::vector<std::string> setting;  // one line each
    std::vector<std::string> notes;   // what was left out and why, what to beware of
    std::vector<Row> rows;
    std::vector<RetrievalRow> retrieval;
    std::vector<TrajectoryRow> trajectories;
    std::vector<PartRow> parts;
    std::vector<KeyShape> keys;
};

// Fills in Row::front.
void mark_fronts(std::vector<Row>& rows);

std::string terminal(const Verdict& verdict);
std::string json_lines(const Verdict& verdict);

}  // namespace crumb
