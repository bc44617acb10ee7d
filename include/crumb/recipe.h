// A recipe is plain data: which stages K and V pass through on their way into a page. A method of a paper is a row of one
// table (recipes()); adding one is adding a row.
//
//   write   x (after RoPE, BF16) -> centre -> map -> clip -> quantise -> codes and side info -> page
//   read    x_hat = mean + page mean + s_t sum_p B_p (digit_tp - 1.5) + z_t ones
//   read    x_hat = mean + sum_j y_tj (row j of the inverse map)     where parameters belong to groups (page.h, family C)
//
// Most recipes give every direction the same width, so their pages follow from the head sizes (page_format). `planes`
// spends a budget of bits over directions, heads, layers, K and V, wherever the artefact says they buy most: its pages
// differ by layer (page_formats). The rate is part of the recipe: `planes:1.5`.
//
// SideTables holds what is static for one (layer, KV head, side): the mean, the map, B and ones. Attention needs only B,
// ones and the means: q' = B q on the query side, o = sum_p o'_p B_p on the output side.
//
// Arithmetic of the encoder is fixed, so that codes depend on nothing but the values, the recipe and the position: FP32,
// c_i = x_i - mean_i, minus the page mean of c where there is one, y_j = sum over i ascending of fma(c_i, T_ij), one
// rounding rule, side info rounded to its stored form before codes are chosen. Every backend must give the same bytes.
#pragma once

#include <crumb/page.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace crumb {

class Artefact;  // artefact.h

enum class Centre : uint8_t {
    none,
    key_mean,  // the static mean of the keys of a head (artefact). Softmax does not see a constant added to all keys
};

enum class Map : uint8_t {
    identity,
    hadamard,  // orthonormal Sylvester; a head size that is no power of two: blocks of its largest power-of-two divisor
    rotation,  // the artefact's D x D rotation of this head or layer (OSCAR: U H P_br)
    planes,    // the artefact's whitened basis of this head (artefact.h); it decides about centre and page mean as well
    signed_hadamard,  // random signs (a fixed sequence), then hadamard
};

enum class Quantiser : uint8_t {
    bf16,    // no codes
    minmax,  // asymmetric, scale and zero from the range of a token
    gain,    // static steps, one gain a token found by a search over six starts and least squares
    lloyd,   // rms of a token as its gain, levels of the best quantiser of a normal variable (Lloyd, Max)
    lloyd_norm,  // the same codes; the gain makes the norm of what is read that of the token
    channels,    // asymmetric, scale and zero from the range of a direction in a group of tokens
};

// What divides a token before its page is quantised, and multiplies what is read.
enum class TokenGain : uint8_t {
    none,
    norm,        // its length in this head
    layer_norm,  // its length in all KV heads of the layer together
    balanced,    // rows and columns of the page scaled in turn until their deviations agree (KVarN)
};

struct SideRecipe {
    Centre centre = Centre::none;
    Map map = Map::identity;
    Quantiser quantiser = Quantiser::bf16;
    int bits = 16;      // 2, 4, 6 or 8 a direction; 3 with a table of levels; 0: unequal, by budget; 16 for BF16
    float clip = 1.0f;  // minmax: |y| is clipped to its order statistic min(int(clip D), D - 1); 1: no clip
    SideInfo info = SideInfo::none;
    bool page_mean = false;
    int group = 0;              // minmax: directions, channels: tokens that share scale and zero; 0: all of a token
    bool integer_zero = false;  // 0 is a level: the zero is a whole number of scales
    float shrink = 1.0f;        // both ends of the range are multiplied by it; what lies outside takes the end
    TokenGain token_gain = TokenGain::none;  // channels
    bool channel_gain = false;  // minmax: the columns of TokenGain::balanced divide before the token's range is taken
    float boosted = 0.0f;       // channels: the share of directions, of largest mean |y|, that gets two more bits
    int outliers = 0;           // tokens of a page with the smallest sum of |k| that stay FP16, K and V

    bool operator==(const SideRecipe&) const = default;
};

// Tokens at the start and at the end of a sequence that stay BF16.
struct Windows {
    int sink = 64;
    int recent = 256;
    bool operator==(const Windows&) const = default;
};

struct Recipe {
    std::string_view name;     // what --kv takes
    std::string_view summary;  // one line for people
    std::string_view source;   // paper and section
    SideRecipe k, v;
    double rate = 0;  // budget: bits an element of the pages, side information included; 0: the widths say it all
    int page_tokens = kPageTokens;
    Windows paper = {};  // the windows of its paper; every recipe runs with those of Windows{} unless asked

    bool coded() const { return k.quantiser != Quantiser::bf16; }
    bool budgeted() const { return rate > 0; }
    bool needs_artefact() const;
    bool operator==(const Recipe&) const = default;
    // Whether attention has no kernel that reads its codes in place: pages are turned into numbers first, at many times
    // the cost. Such a recipe runs only for who accepts that.
    bool slow() const;
};

// Rates that a budgeted recipe takes.
inline constexpr double kLeastRate = 1.25, kMostRate = 4.0;

// All rows, in the order in which they are listed to people.
std::span<const Recipe> recipes();

// What says which part of a row costs how much: K alone and V alone (NAME:K, NAME:V; the other side has 8 bits by the range
// of a token, next to nothing lost), and the row without each stage that it has (NAME:no-map, NAME:no-clip, ...; NAME:paper
// where the key mean is removed). For measurements: recipes() does not list them. With the rate of `recipe`.
std::vector<Recipe> ablations(const Recipe& recipe);

// A name of recipes() or of one of their ablations, or NAME:RATE for a budgeted one. Throws Error that lists the names when there is none of this
// name, or says which rates there are.
Recipe find_recipe(std::string_view name);

// What find_recipe() takes for it: NAME, or NAME:RATE where the rate is not the row's own.
std::string label(const Recipe& recipe);

// The page that `recipe` fills for heads of these sizes. Throws Error for sizes without a page format, and for recipes
// with a budget.
PageFormat page_format(const Recipe& recipe, int dim_k, int dim_v);

// A layer whose K and V are coded.
struct CodedLayer {
    int layer = 0;  // the model's own number
    int n_head_kv = 0;
    int dim_k = 0;
    int dim_v = 0;
};

// The pages of all coded layers of a model, in their order. A budget is spent over all of them together, so that their
// mean is at most the recipe's rate. Throws Error as page_format() and layer_tables() do.
std::vector<PageFormat> page_formats(const Recipe& recipe, std::span<const CodedLayer> layers,
                                     const Artefact* artefact);

// Orthonormal d x d, row major; block diagonal where d is no power of two.
std::vector<float> hadamard(int d);

// Static tables of one (layer, KV head, side). Row-vector convention; matrices are row major.
struct SideTables {
    SideFormat format;
    std::vector<float> mean;       // [D], or empty
    std::vector<float> encode;     // [D][D], y = (x - mean) encode; empty: identity
    std::vector<float> decode;     // [P][D], row p is what one step of plane p's digit adds; padding rows are 0
    std::vector<float> ones;       // [D], what one unit of zero adds to every direction; empty unless scale_zero
    std::vector<uint16_t> direction;  // [P], the direction that plane p codes; kNoDirection for padding
    std::vector<uint8_t> digit;       // [P], which base-4 digit of it (0 is the lowest), or kSharedDigit
    std::vector<uint8_t> digits;      // [D], digits of a direction's code: 0 to 4
    std::vector<float> sigma;      // [D], gain: rms of y; empty otherwise
    std::vector<float> step;       // [D], gain: static step at gain 1; empty otherwise
    float gain_reference = 1.0f;   // gain8: ref
    std::vector<float> mean_step;  // [D], step of the int8 page mean; empty unless format.mean
    std::vector<float> levels;     // what a code of a lookup format reads as, ascending; empty otherwise
};

inline constexpr uint16_t kNoDirection = 0xffff;
inline constexpr uint8_t kSharedDigit = 0xff;  // 3 bits: a plane holds the third bits of a direction and its neighbour
inline constexpr float kStepFloor = 0x1p-24f;  // of every static step: a channel that is always 0 has no range

struct HeadTables {
    SideTables k, v;
};

// Tables of one layer for its pages, one entry a KV head. `artefact` may be null for recipes that need none; a recipe
// that needs one throws Error without it, or if it lacks this layer or has another head size.
std::vector<HeadTables> layer_tables(const Recipe& recipe, int layer, int n_head_kv, const PageFormat& format,
                                     const Artefact* artefact);

// What went wrong, or nearly, while values were written: shown in metrics, never hidden.
struct EncodeCounts {
    uint64_t rows = 0;       // of K and of V
    uint64_t nonfinite = 0;  // elements that were NaN (coded as 0) or infinite (coded as the largest value)
    uint64_t saturated = 0;  // rows with a mapped value beyond FP16 or a gain outside its range
    EncodeCounts& operator+=(const EncodeCounts& other);
    bool operator==(const EncodeCounts&) const = default;
};

// Encodes the tokens of a page of one head. k and v: BF16 rows [tokens][D], in token order. Rows below `keep` are not encoded: their
// codes, side info and the page means are taken over from `kept`, a page of the same format or `page` itself (tokens whose
// 16-bit values are gone, see cache.h), and so is what a group shares that has such rows; keep = 0 and kept = nullptr
// otherwise. A BF16 format copies the rows. layer_norms: [tokens] lengths of the centred keys in all heads, for
// TokenGain::layer_norm; nullptr otherwise, and for rows of nothing that fill a page up.
EncodeCounts encode_page(const Recipe& recipe, const PageFormat& format, const HeadTables& tables,
                         std::span<const bf16> k, std::span<const bf16> v, std::byte* page, int keep = 0,
                         const std::byte* kept = nullptr, const float* layer_norms = nullptr);

// Encodes some tokens of a page, k [n][D] and v [n][D], as its tokens [first, first + n); the others stay. For planar formats
// without page means, in which a token has its codes to itself. The bytes are those of encode_page().
EncodeCounts encode_rows(const Recipe& recipe, const PageFormat& format, const HeadTables& tables, std::span<const bf16> k,
                         std::span<const bf16> v, int first, std::byte* page);

// Adds the squared lengths of centred keys of one head to energy[tokens]: the square of layer_norms, once all are added.
void add_key_energy(const SideTables& tables, std::span<const bf16> k, std::span<float> energy);

// The values that a page stands for: rows [tokens][D] in FP32. Slow and obvious, the definition of what codes mean.
void decode_keys(const PageFormat& format, const SideTables& tables, const std::byte* page, std::span<float> rows);
void decode_values(const PageFormat& format, const SideTables& tables, const std::byte* page, std::span<float> rows);

// The same before the inverse map, where a format is not planar: y [tokens][D]. x_hat = mean + y (inverse map).
void key_directions(const PageFormat& format, const SideTables& tables, const std::byte* page, std::span<float> y);
void value_directions(const PageFormat& format, const SideTables& tables, const std::byte* page, std::span<float> y);

// Row j of the inverse map: what one unit of direction j adds to the channels. [D], part of `decode`.
std::span<const float> inverse_row(const SideTables& tables, int direction);

// Scale, zero (0 unless scale_zero) of token t in planar formats: side info in its numeric form.
struct TokenInfo {
    float scale, zero;
};
TokenInfo key_info_at(const PageFormat& format, const SideTables& tables, const std::byte* page, int token);
TokenInfo value_info_at(const PageFormat& format, const SideTables& tables, const std::byte* page, int token);

}  // namespace crumb
