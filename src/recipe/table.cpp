// The table of recipes.
#include <crumb/error.h>
#include <crumb/recipe.h>

#include <algorithm>
#include <charconv>
#include <deque>

#include "recipe/ablation.h"
#include "recipe/side_format.h"

namespace crumb {

namespace {

constexpr SideRecipe minmax(Centre centre, Map map, int bits, float clip = 1.0f, float shrink = 1.0f) {
    return {.centre = centre,
            .map = map,
            .quantiser = Quantiser::minmax,
            .bits = bits,
            .clip = clip,
            .info = SideInfo::scale_zero,
            .shrink = shrink};
}

// About what the study measured `planes` at.
constexpr double kPlanesRate = 2.2;

constexpr SideRecipe gain(Map map, int bits) {
    return {.map = map, .quantiser = Quantiser::gain, .bits = bits, .info = SideInfo::gain8};
}

constexpr SideRecipe lloyd(Centre centre, int bits, Quantiser quantiser) {
    return {.centre = centre,
            .map = Map::signed_hadamard,
            .quantiser = quantiser,
            .bits = bits,
            .info = SideInfo::gain16};
}

// 2 bits, K by channel, V by token.
constexpr SideRecipe by_channel(int group) {
    return {.quantiser = Quantiser::channels, .bits = 2, .info = SideInfo::channels, .group = group};
}

constexpr SideRecipe by_token(int group) {
    return {.quantiser = Quantiser::minmax, .bits = 2, .info = SideInfo::scale_zero, .group = group};
}

constexpr SideRecipe omni_key(TokenGain gain) {
    SideRecipe side = by_channel(32);
    side.centre = Centre::key_mean;
    side.map = Map::hadamard;
    side.integer_zero = true;
    side.token_gain = gain;
    return side;
}

constexpr SideRecipe omni_value() {
    SideRecipe side = by_token(32);
    side.map = Map::hadamard;
    side.integer_zero = true;
    return side;
}

constexpr SideRecipe kitty_key() {
    SideRecipe side = by_channel(128);
    side.boosted = 0.25f;
    return side;
}

constexpr SideRecipe with_outliers(SideRecipe side) {
    side.outliers = 3;
    return side;
}

constexpr SideRecipe kvarn_key() {
    SideRecipe side = by_channel(128);
    side.centre = Centre::key_mean;
    side.map = Map::hadamard;
    side.token_gain = TokenGain::balanced;
    return side;
}

constexpr SideRecipe kvarn_value() {
    SideRecipe side = by_token(0);
    side.map = Map::hadamard;
    side.channel_gain = true;
    return side;
}

constexpr int kDoublePage = 2 * kPageTokens;
constexpr Windows kNone = {.sink = 0, .recent = 0};

// The methods, one row each. What it says of windows is the paper's; docs/guides/recipes.md says what we changed.
constexpr Recipe kRows[] = {
    {.name = "bf16", .summary = "16 bits, nothing lost: the baseline", .source = "", .k = {}, .v = {}},
    {.name = "q8",
     .summary = "8 bits by the range of a token",
     .source = "round to nearest",
     .k = minmax(Centre::key_mean, Map::identity, 8),
     .v = minmax(Centre::none, Map::identity, 8),
     .paper = kNone},
    {.name = "int4",
     .summary = "4 bits by the range of a token",
     .source = "round to nearest, as the baseline of SAW-INT4 (arXiv 2604.19157)",
     .k = minmax(Centre::key_mean, Map::identity, 4),
     .v = minmax(Centre::none, Map::identity, 4),
     .paper = kNone},
    {.name = "int2",
     .summary = "2 bits by the range of a token",
     .source = "round to nearest, as the baseline of KIVI (arXiv 2402.02750), section 3",
     .k = minmax(Centre::key_mean, Map::identity, 2),
     .v = minmax(Centre::none, Map::identity, 2),
     .paper = kNone},
    {.name = "quarot",
     .summary = "Hadamard rotation, 2 bits by the range of a token",
     .source = "QuaRot (arXiv 2404.00456), KV cache, without its clip of the range",
     .k = minmax(Centre::key_mean, Map::hadamard, 2),
     .v = minmax(Centre::none, Map::hadamard, 2),
     .paper = kNone},
    {.name = "rotatekv",
     .summary = "Hadamard rotation, 2 bits by 0.8 times the range of a token",
     .source = "RotateKV (arXiv 2501.16383), keys after RoPE, one head a rotation",
     .k = minmax(Centre::key_mean, Map::hadamard, 2, 1.0f, 0.8f),
     .v = minmax(Centre::none, Map::hadamard, 2, 1.0f, 0.8f),
     .paper = {.sink = 20, .recent = 0}},
    {.name = "saw4",
     .summary = "Hadamard rotation, 4 bits by the range of a token",
     .source = "SAW-INT4 (arXiv 2604.19157), rotation of the whole head on K and V",
     .k = minmax(Centre::key_mean, Map::hadamard, 4),
     .v = minmax(Centre::none, Map::hadamard, 4),
     .paper = kNone},
    {.name = "oscar",
     .summary = "learned rotations, clipped range of a token, 2 bits",
     .source = "OSCAR (arXiv 2605.17757)",
     .k = minmax(Centre::key_mean, Map::rotation, 2, 0.96f),
     .v = minmax(Centre::none, Map::rotation, 2, 0.92f),
     .paper = {.sink = 64, .recent = 256}},
    {.name = "turbo2",
     .summary = "Hadamard rotation with random signs, 2-bit levels of a normal variable, rms of a token",
     .source = "TurboQuant (arXiv 2504.19874), MSE form, section 3.1",
     .k = lloyd(Centre::key_mean, 2, Quantiser::lloyd),
     .v = lloyd(Centre::none, 2, Quantiser::lloyd),
     .paper = kNone},
    {.name = "turbo3",
     .summary = "as turbo2, 3 bits",
     .source = "TurboQuant (arXiv 2504.19874), MSE form, section 3.1",
     .k = lloyd(Centre::key_mean, 3, Quantiser::lloyd),
     .v = lloyd(Centre::none, 3, Quantiser::lloyd),
     .paper = kNone},
    {.name = "turbo4",
     .summary = "as turbo2, 4 bits",
     .source = "TurboQuant (arXiv 2504.19874), MSE form, section 3.1",
     .k = lloyd(Centre::key_mean, 4, Quantiser::lloyd),
     .v = lloyd(Centre::none, 4, Quantiser::lloyd),
     .paper = kNone},
    {.name = "turbo2+",
     .summary = "as turbo2, read with the norm of the token",
     .source = "TurboQuant+, the community's norm correction, block of a head",
     .k = lloyd(Centre::key_mean, 2, Quantiser::lloyd_norm),
     .v = lloyd(Centre::none, 2, Quantiser::lloyd_norm),
     .paper = kNone},
    {.name = "turbo3+",
     .summary = "as turbo3, read with the norm of the token",
     .source = "TurboQuant+, the community's norm correction, block of a head",
     .k = lloyd(Centre::key_mean, 3, Quantiser::lloyd_norm),
     .v = lloyd(Centre::none, 3, Quantiser::lloyd_norm),
     .paper = kNone},
    {.name = "turbo4+",
     .summary = "as turbo4, read with the norm of the token",
     .source = "TurboQuant+, the community's norm correction, block of a head",
     .k = lloyd(Centre::key_mean, 4, Quantiser::lloyd_norm),
     .v = lloyd(Centre::none, 4, Quantiser::lloyd_norm),
     .paper = kNone},
    {.name = "kivi32",
     .summary = "2 bits, K by channel in groups of 32 tokens, V by token in groups of 32 channels",
     .source = "KIVI (arXiv 2402.02750), G = 32",
     .k = by_channel(32),
     .v = by_token(32),
     .paper = {.sink = 0, .recent = 128}},
    {.name = "kivi128",
     .summary = "2 bits, K by channel in groups of 128 tokens, V by token in groups of 128 channels",
     .source = "KIVI (arXiv 2402.02750), G = 128",
     .k = by_channel(128),
     .v = by_token(128),
     .page_tokens = kDoublePage,
     .paper = {.sink = 0, .recent = 128}},
    {.name = "ott",
     .summary = "as kivi128, and 3 tokens of smallest keys of each 128 stay FP16",
     .source = "Outlier Tokens Tracing (arXiv 2505.10938), a pool a page in place of one a sequence",
     .k = with_outliers(by_channel(128)),
     .v = with_outliers(by_token(128)),
     .page_tokens = kDoublePage,
     .paper = {.sink = 0, .recent = 64}},
    {.name = "kitty",
     .summary = "as kivi128, and a quarter of the channels of K, those of largest mean |k|, has 4 bits",
     .source = "Kitty (arXiv 2511.18643), the released kernel's share of channels",
     .k = kitty_key(),
     .v = by_token(128),
     .page_tokens = kDoublePage,
     .paper = {.sink = 32, .recent = 128}},
    {.name = "kvarn",
     .summary = "Hadamard rotation, tokens and channels of 128 tokens balanced in turn, 2 bits, K by channel, V by token",
     .source = "KVarN (arXiv 2606.03458), k2v2",
     .k = kvarn_key(),
     .v = kvarn_value(),
     .page_tokens = kDoublePage,
     .paper = {.sink = 128, .recent = 64}},
    {.name = "omni",
     .summary = "Hadamard rotation, keys divided by their norm, 2 bits, K by channel in groups of 32 tokens, V by token",
     .source = "OScaR (arXiv 2605.19660), norm per head",
     .k = omni_key(TokenGain::norm),
     .v = omni_value(),
     .paper = {.sink = 0, .recent = 128}},
    {.name = "omni:layer",
     .summary = "as omni, one norm for the heads of a layer together",
     .source = "OScaR (arXiv 2605.19660), norm of the released code",
     .k = omni_key(TokenGain::layer_norm),
     .v = omni_value(),
     .paper = {.sink = 0, .recent = 256}},
    {.name = "had2",
     .summary = "Hadamard rotation, 2 bits, one 8-bit gain a token; needs no calibration",
     .source = "ours: Gaussian step, gain by least squares",
     .k = gain(Map::hadamard, 2),
     .v = gain(Map::hadamard, 2)},
    {.name = "planes",
     .summary = "bits where they buy most, one 8-bit gain a token, page means; planes:1.25 to planes:4 bits in all",
     .source = "ours: decorrelated in the metric of crumb calibrate --metric, one budget for the model",
     .k = gain(Map::planes, 0),
     .v = gain(Map::planes, 0),
     .rate = kPlanesRate},
};

// The key mean is removed unless the row is the paper's own (":paper"): it changes no softmax, and models with a key
// bias collapse without it. Rows by channel need no such thing, their zeros hold it. The mean of V is never removed:
// tokens with a tiny V matter and would become minus the mean.
class Table {
  public:
    Table() {
        for (const Recipe& row : kRows) {
            if (row.k.centre != Centre::key_mean) {
                rows_.push_back(row);
                continue;
            }
            Recipe ours = row, paper = row;
            ours.summary = own(fmt::format("{}; key mean removed", row.summary));
            paper.name = own(fmt::format("{}:paper", row.name));
            paper.k.centre = Centre::none;
            rows_.push_back(ours);
            rows_.push_back(paper);
        }
        for (const Recipe& row : rows_) {
            for (const Variation& variation : variations(row)) {
                Recipe changed = row;
                changed.name = own(fmt::format("{}:{}", row.name, variation.name));
                changed.summary = own(fmt::format("{} {}", row.name, variation.what));
                changed.k = variation.k;
                changed.v = variation.v;
                ablations_.push_back({row.name, changed});
            }
        }
    }

    std::span<const Recipe> rows() const { return rows_; }

    std::vector<Recipe> ablations_of(std::string_view row) const {
        std::vector<Recipe> result;
        for (const auto& [of, recipe] : ablations_) {
            if (of == row) {
                result.push_back(recipe);
            }
        }
        return result;
    }

    // A row or an ablation of one; nullptr if there is none of this name.
    const Recipe* find(std::string_view name) const {
        if (const auto row = std::ranges::find(rows_, name, &Recipe::name); row != rows_.end()) {
            return &*row;
        }
        const auto found = std::ranges::find(ablations_, name, [](const Ablation& a) { return a.recipe.name; });
        return found == ablations_.end() ? nullptr : &found->recipe;
    }

  private:
    struct Ablation {
        std::string_view of;
        Recipe recipe;
    };

    std::string_view own(std::string text) { return texts_.emplace_back(std::move(text)); }

    std::deque<std::string> texts_;
    std::vector<Recipe> rows_;
    std::vector<Ablation> ablations_;
};

const Table& table() {
    static const Table table;
    return table;
}

bool needs_artefact(const SideRecipe& side) {
    return side.centre == Centre::key_mean || side.map == Map::rotation || side.map == Map::planes;
}

Recipe with_rate(Recipe recipe, std::string_view rate) {
    const auto [end, error] = std::from_chars(rate.data(), rate.data() + rate.size(), recipe.rate);
    if (error != std::errc{} || end != rate.data() + rate.size() ||
        !(recipe.rate >= kLeastRate && recipe.rate <= kMostRate)) {
        fail("KV recipe '{}' takes a rate from {} to {} bits an element, not '{}': for example {}:{}", recipe.name,
             kLeastRate, kMostRate, rate, recipe.name, kPlanesRate);
    }
    return recipe;
}

}  // namespace

SideFormat side_format(const SideRecipe& side, int dim) {
    if (side.quantiser == Quantiser::bf16) {
        return {.dim = dim};
    }
    const int thirds = side.bits == 3 ? dim / 2 : 0;  // planes of third bits
    SideFormat format = {.dim = dim,
                         .planes = padded_planes(dim * (side.bits / 2) + thirds, 1),
                         .info = side.info,
                         .mean = side.page_mean,
                         .group = side.group,
                         .lookup = side.quantiser == Quantiser::lloyd || side.quantiser == Quantiser::lloyd_norm,
                         .token_gain = side.token_gain != TokenGain::none,
                         .channel_gain = side.channel_gain,
                         .boosted = int(side.boosted * float(dim)),
                         .outliers = side.outliers};
    if (side.info == SideInfo::scale_zero && side.group >= dim) {
        format.group = 0;
    }
    return format;
}

bool Recipe::needs_artefact() const { return crumb::needs_artefact(k) || crumb::needs_artefact(v); }

bool Recipe::slow() const {
    return page_tokens != kPageTokens || !side_format(k, kPageTokens).planar() || !side_format(v, kPageTokens).planar();
}

std::span<const Recipe> recipes() { return table().rows(); }

std::vector<Recipe> ablations(const Recipe& recipe) {
    std::vector<Recipe> result = table().ablations_of(recipe.name);
    for (Recipe& ablation : result) {
        ablation.rate = recipe.rate;
    }
    if (const Recipe* paper = table().find(fmt::format("{}:paper", recipe.name))) {
        result.push_back(*paper);
    }
    return result;
}

std::string label(const Recipe& recipe) {
    const Recipe* row = table().find(recipe.name);
    const bool usual = row && row->rate == recipe.rate;
    return usual ? std::string(recipe.name) : fmt::format("{}:{}", recipe.name, recipe.rate);
}

Recipe find_recipe(std::string_view name) {
    if (const Recipe* row = table().find(name)) {
        return *row;
    }
    const size_t colon = std::min(name.rfind(':'), name.size());
    if (const Recipe* row = table().find(name.substr(0, colon)); row && row->budgeted() && colon < name.size()) {
        return with_rate(*row, name.substr(colon + 1));
    }
    std::string names;
    for (const Recipe& recipe : recipes()) {
        names.append(names.empty() ? "" : ", ").append(recipe.name);
    }
    fail("there is no KV recipe '{}'. Recipes are: {}", name, names);
}

PageFormat page_format(const Recipe& recipe, int dim_k, int dim_v) {
    if (recipe.budgeted()) {
        fail("pages of KV recipe '{}' differ by layer and depend on the model's artefact; take another recipe here",
             recipe.name);
    }
    const PageFormat format = {
        .k = side_format(recipe.k, dim_k), .v = side_format(recipe.v, dim_v), .tokens = recipe.page_tokens};
    check(format);
    return format;
}

}  // namespace crumb
