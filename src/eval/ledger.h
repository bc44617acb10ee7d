// What has been measured, one JSON object a line. A measurement is known by everything that could change it: model,
// artefact and program by hash, recipe, tokens by hash, context, windows, rule, threads, processor. Another value of any
// of them is another measurement; nothing is ever mixed or overwritten.
//
//   {"kind":"window", "key":{...}, "speed":{...}, "blocks":[{"kld":SUM,"nll_base":SUM,"nll":SUM,"same_top":N,"positions":HEX},...]}
//   {"kind":"retrieval", "key":{...}, "answers":[{"depth":D,"right":B,"nll":X},...]}
//   {"kind":"trajectory", "key":{...}, "tokens":[...]} of 16 bit, {"...","agrees":"1101..."} of a recipe
//   {"kind":"keys", "key":{...}, "heads":[...]}
// HEX is one float32 a position, eight digits each: its KL divergence, exactly.
#pragma once

#include "eval/line_file.h"
#include "eval/retrieval.h"
#include "eval/spectrum.h"

#include <crumb/eval.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace crumb {

// By name, in the order of the names. Values are texts: numbers are written out.
using Key = std::map<std::string, std::string>;

struct Speed {
    double prompt = 0;    // tokens a second, whole window
    double generated = 0;  // tokens a second, one by one at the end of the window
};

struct WindowRecord {
    DivergenceSum divergence;  // of 16 bit: from itself
    Speed speed;
};

struct TrajectoryRecord {
    std::vector<int32_t> tokens;  // of 16 bit: what it generates
    std::vector<bool> agrees;     // of a recipe: whether it would have gone on with the same token
    Speed speed;
};

class Ledger {
  public:
    // Throws Error that names the line if the file holds something else.
    explicit Ledger(const std::filesystem::path& file);

    std::optional<WindowRecord> window(const Key& key) const;
    std::optional<std::vector<Answer>> retrieval(const Key& key) const;
    std::optional<TrajectoryRecord> trajectory(const Key& key) const;
    std::optional<std::vector<KeyShape>> keys(const Key& key) const;

    void add(const Key& key, const WindowRecord& record);
    void add(const Key& key, const std::vector<Answer>& answers);
    void add(const Key& key, const TrajectoryRecord& record);
    void add(const Key& key, const std::vector<KeyShape>& shapes);

    size_t size() const { return records_.size(); }

  private:
    const std::string* find(const char* kind, const Key& key) const;
    void append(std::string id, std::string line);

    LineFile file_;
    std::map<std::string, std::string> records_;  // by kind and key; the last of equal ones
};

}  // namespace crumb
