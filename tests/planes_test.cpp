// `planes`: digits and budgets against their definitions, tables and pages against the study's own PyTorch code
// (data/planes_study.py), bases fitted on data of a known nature.
#include "recipe/planes.h"

#include <crumb/calibrate.h>
#include <crumb/error.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "files.h"
#include "planes_cases.h"

namespace crumb {
namespace {

double expected_loss(std::span<const float> spectrum, std::span<const uint8_t> digits) {
    double sum = 0;
    for (size_t i = 0; i < spectrum.size(); ++i) {
        sum += double(spectrum[i]) * kGaussian[digits[i]].error;
    }
    return sum;
}

TEST(Digits, AreTheBestThereAre) {
    const std::vector<float> spectrum = {5.0f, 0.3f, 40.0f, 0.0f, 1.0f};
    for (int planes = 0; planes <= 7; ++planes) {
        double least = INFINITY;
        for (int n = 0; n < 1024; ++n) {  // every way to give 0 .. 3 digits to 5 directions
            std::vector<uint8_t> digits(5);
            for (int i = 0; i < 5; ++i) {
                digits[i] = uint8_t(n >> 2 * i & 3);
            }
            if (std::accumulate(digits.begin(), digits.end(), 0) == planes) {
                least = std::min(least, expected_loss(spectrum, digits));
            }
        }
        EXPECT_NEAR(expected_loss(spectrum, assign_digits(spectrum, planes)), least, 1e-12);
    }
}

RC_GTEST_PROP(Budgets, AreSpentAndNotOverspent, ()) {
    const auto in = [](int low, int high) { return *rc::gen::inRange(low, high + 1); };
    std::vector<PlanesSide> sides;
    std::vector<PlanesLayer> layers;
    const int n = in(1, 6);
    sides.reserve(size_t(2 * n));
    for (int i = 0; i < n; ++i) {
        const int heads = in(1, 3), dim = 32 * in(1, 4);
        for (int s = 0; s < 2; ++s) {
            sides.push_back(side_with(heads, dim, std::exp(in(-8, 8)), 1 - in(1, 300) / 1000.0, in(0, 1)));
        }
        layers.push_back({heads, &sides[size_t(2 * i)], &sides[size_t(2 * i + 1)]});
    }
    Recipe recipe = find_recipe("planes");
    recipe.rate = in(300, 600) / 100.0;
    const auto formats = planes_formats(layers, recipe);
    double bits = 0, elements = 0, step = 0;
    bool full = true;
    for (int i = 0; i < n; ++i) {
        const double e = 64.0 * layers[i].n_head_kv * (formats[i].k.dim + formats[i].v.dim);
        bits += formats[i].bits_per_element() * e;
        elements += e;
        step = std::max(step, 2.0 * kPlaneStep * 64 * layers[i].n_head_kv);
        for (const auto& [format, side] : {std::pair{formats[i].k, layers[i].k}, std::pair{formats[i].v, layers[i].v}}) {
            RC_ASSERT(format.planes % kPlaneStep == 0 && format.planes >= kPlaneStep && format.planes <= 3 * format.dim);
            RC_ASSERT(format.info == SideInfo::gain8 && format.mean == side->page_step.present());
            full = full && format.planes == 3 * format.dim;
        }
        check(formats[i]);
    }
    RC_ASSERT(bits <= recipe.rate * elements);
    RC_ASSERT(full || bits > recipe.rate * elements - step);
}

TEST(Budgets, GoWhereErrorsAreDear) {
    const PlanesSide dear = side_with(2, 64, 16.0, 0.97, true), cheap = side_with(2, 64, 0.1, 0.97, false);
    const PlanesLayer layers[] = {{2, &dear, &cheap}, {2, &cheap, &cheap}};
    const auto formats = planes_formats(layers, find_recipe("planes:2.5"));
    EXPECT_GT(formats[0].k.planes, formats[0].v.planes);
    EXPECT_EQ(formats[0].v.planes, formats[1].k.planes);
    EXPECT_EQ(error_of([&] { planes_formats(layers, find_recipe("planes:1.25")); }).find("0.125"), std::string::npos);
    const PlanesLayer costly[] = {{2, &dear, &dear}};
    EXPECT_TRUE(contains(error_of([&] { planes_formats(costly, find_recipe("planes:1.25")); }), "take 1.250") ||
                planes_formats(costly, find_recipe("planes:1.25"))[0].bits_per_element() <= 1.25);
    const PlanesSide small = side_with(1, 32, 1.0, 0.9, true);
    const PlanesLayer tiny[] = {{1, &small, &small}};
    EXPECT_TRUE(contains(error_of([&] { planes_formats(tiny, find_recipe("planes:1.5")); }), "--kv planes:2.38 or more"));
}

TEST(Rates, AreReadAndNamed) {
    EXPECT_EQ(label(find_recipe("planes")), "planes");
    EXPECT_EQ(label(find_recipe("planes:1.5")), "planes:1.5");
    EXPECT_EQ(label(find_recipe("planes:2.2")), "planes");
    EXPECT_EQ(label(find_recipe("oscar:paper")), "oscar:paper");
    EXPECT_EQ(find_recipe("planes:3").rate, 3.0);
    for (const char* wrong : {"planes:", "planes:x", "planes:1", "planes:4.5", "planes:nan", "planes:2x"}) {
        EXPECT_TRUE(contains(error_of([&] { find_recipe(wrong); }), "from 1.25 to 4 bits")) << wrong;
    }
    EXPECT_TRUE(contains(error_of([] { find_recipe("had2:2"); }), "there is no KV recipe"));
}

TEST(Artefacts, WithoutBasesAreRefusedWithTheCommand) {
    Artefact artefact;
    artefact.layers[0].k_mean = {1, 32, std::vector<float>(32)};
    const CodedLayer layers[] = {{0, 1, 32, 32}};
    const Recipe planes = find_recipe("planes");
    EXPECT_TRUE(contains(error_of([&] { page_formats(planes, layers, &artefact); }), "crumb calibrate -m"));
    EXPECT_TRUE(contains(error_of([&] { page_formats(planes, layers, nullptr); }), "crumb calibrate -m"));
    artefact.layers[0].k_planes = artefact.layers[0].v_planes = side_with(2, 32, 1.0, 0.9, false);
    EXPECT_TRUE(contains(error_of([&] { page_formats(planes, layers, &artefact); }), "has 2 key"));
}

// --- against the study

const std::filesystem::path kStudy = std::filesystem::path(CRUMB_SOURCE) / "tests" / "data" / "planes_study.json";

std::vector<float> floats(const nlohmann::json& text) {
    const auto s = text.get<std::string>();
    std::vector<float> values;
    for (size_t i = 0; i < s.size(); i += 8) {
        values.push_back(std::bit_cast<float>(uint32_t(std::stoul(s.substr(i, 8), nullptr, 16))));
    }
    return values;
}

struct StudySide {
    SideTables tables;
    std::vector<bf16> rows;
    std::vector<int> codes, page_mean;
    std::vector<float> gain, values;
};

StudySide study_side(const nlohmann::json& s, SideInfo info) {
    StudySide side;
    const auto rows = s["rows"].get<std::string>(), codes = s["codes"].get<std::string>();
    for (size_t i = 0; i < rows.size(); i += 4) {
        side.rows.push_back({uint16_t(std::stoul(rows.substr(i, 4), nullptr, 16))});
    }
    for (size_t i = 0; i < codes.size(); i += 2) {
        side.codes.push_back(std::stoi(codes.substr(i, 2), nullptr, 16));
    }
    side.page_mean = s["page_mean"].get<std::vector<int>>();
    side.gain = floats(s["gain"]);
    side.values = floats(s["values"]);

    const auto spectrum = floats(s["spectrum"]), decode = floats(s["decode"]);
    const int dim = int(spectrum.size());
    SideTables& t = side.tables;
    t.format = {.dim = dim, .planes = dim, .info = info, .mean = !side.page_mean.empty()};
    t.mean = floats(s["mean"]);
    t.mean_step = floats(s["page_step"]);
    t.encode = floats(s["encode"]);
    t.sigma = floats(s["sigma"]);
    t.step = floats(s["step"]);
    t.gain_reference = floats(s["reference"])[0];
    t.digits = assign_digits(spectrum, dim);
    std::string digits;
    for (const uint8_t d : t.digits) {
        digits += char('0' + d);
    }
    EXPECT_EQ(digits, s["digits"].get<std::string>());
    finish_tables(t, std::vector<double>(decode.begin(), decode.end()));
    return side;
}

// Sums are taken in another order there, so a value on the border of two codes, or a gain on the border of two stored
// ones, may fall to the other side: 0.2 % of the codes do.
void expect_agreement(const StudySide& study, std::span<const uint8_t> digits, std::span<const float> decoded) {
    const int dim = study.tables.format.dim, planes = study.tables.format.planes;
    int other_codes = 0, coded = 0;
    double error = 0, size = 0, largest = 0;
    for (int t = 0; t < kPageTokens; ++t) {
        std::vector<int> code(dim);
        for (int p = 0; p < planes; ++p) {
            code[study.tables.direction[p]] += digits[size_t(t) * planes + p] << 2 * study.tables.digit[p];
        }
        for (int i = 0; i < dim; ++i) {
            const size_t at = size_t(t) * dim + i;
            coded += study.tables.digits[i] > 0;
            other_codes += study.tables.digits[i] > 0 && code[i] != study.codes[at];
            error += std::pow(double(decoded[at]) - study.values[at], 2);
            size += std::pow(double(study.values[at]), 2);
            largest = std::max(largest, std::abs(double(decoded[at]) - study.values[at]));
        }
    }
    EXPECT_LE(other_codes, coded / 200);
    EXPECT_LE(std::sqrt(error / size), other_codes == 0 ? 1e-5 : 1e-2) << "largest difference " << largest;
}

TEST(Study, SameCodesAndValues) {
    nlohmann::json json;
    std::ifstream(kStudy) >> json;
    const StudySide k = study_side(json["k"], SideInfo::gain8), v = study_side(json["v"], SideInfo::gain16);
    const PageFormat format{k.tables.format, v.tables.format};
    const HeadTables tables{k.tables, v.tables};
    Recipe recipe = find_recipe("planes");
    recipe.v.info = SideInfo::gain16;
    std::vector<std::byte> page(format.bytes());
    encode_page(recipe, format, tables, k.rows, v.rows, page.data());

    std::vector<uint8_t> k_digits(size_t(64) * format.k.planes), v_digits(size_t(64) * format.v.planes);
    unpack_keys(format.k.planes, page.data() + format.key_codes(), k_digits);
    unpack_values(format.v.planes, page.data() + format.value_codes(), v_digits);
    std::vector<float> k_rows(size_t(64) * format.k.dim), v_rows(size_t(64) * format.v.dim);
    decode_keys(format, tables.k, page.data(), k_rows);
    decode_values(format, tables.v, page.data(), v_rows);
    expect_agreement(k, k_digits, k_rows);
    expect_agreement(v, v_digits, v_rows);
    for (int i = 0; i < format.v.dim; ++i) {
        EXPECT_EQ(int(int8_t(page[format.value_mean() + i])), v.page_mean[i]);
    }
}

// --- bases

// Rows of two KV heads and two query heads, 8 sequences of 256 tokens in two folds.
struct Text {
    int dim = 32, n = 8 * 256;
    std::vector<float> k, v, q;

    Text(float key_mean, float page_offset) {
        std::mt19937 random(3);
        std::normal_distribution<float> normal;
        for (auto* x : {&k, &v, &q}) {
            std::vector<float> offset(2 * dim);
            for (int t = 0; t < n; ++t) {
                for (int i = 0; i < 2 * dim; ++i) {
                    if (t % kPageTokens == 0) {
                        offset[i] = page_offset * normal(random);
                    }
                    x->push_back(normal(random) * std::exp(-0.15f * float(i % dim)) + offset[i] + (x == &k ? key_mean : 0.0f));
                }
            }
        }
    }

    Moments observed(int block, int n_threads) const {
        Moments moments(64, n_threads);
        const LayerShape shape{2, 2, dim, dim};
        for (int s = 0; s < 8; ++s) {
            moments.begin_sequence(s % 2);
            for (int t = 0; t < 256; t += block) {
                const auto rows = [&](const std::vector<float>& x) {
                    return HeadRows{x.data() + size_t(256 * s + t) * 2 * dim, size_t(2 * dim), size_t(dim)};
                };
                moments.observe(7, shape, {std::min(block, 256 - t), rows(q), rows(k), rows(v), rows(v)});
            }
        }
        return moments;
    }

    LayerArtefact fitted(std::span<const Metric> metrics = {}, int block = 100, int n_threads = 1) const {
        Artefact artefact;
        const int layers[] = {7};
        add_planes(artefact, observed(block, n_threads), layers, metrics, n_threads);
        check(artefact, "artefact");
        return artefact.layers.at(7);
    }
};

TEST(Bases, DoNotDependOnBlocksAndThreads) {
    const Text text(0.0f, 0.5f);
    const LayerArtefact one = text.fitted();
    EXPECT_EQ(one, text.fitted({}, 64, 2));
    EXPECT_EQ(one, text.fitted({}, 7, 1));
    EXPECT_TRUE(one.k_planes.present() && one.v_planes.present());
    EXPECT_EQ(one.k_planes.encode.heads, 2);
}

TEST(Bases, RemoveTheMeansThatAreThere) {
    const LayerArtefact plain = Text(0.0f, 0.0f).fitted(), biased = Text(8.0f, 0.0f).fitted(), paged = Text(0.0f, 2.0f).fitted();
    EXPECT_FALSE(plain.k_planes.page_step.present() || plain.v_planes.page_step.present());
    EXPECT_TRUE(biased.k_planes.mean.present() || biased.k_planes.page_step.present());
    EXPECT_FALSE(biased.v_planes.page_step.present());
    EXPECT_TRUE(paged.k_planes.page_step.present() && paged.v_planes.page_step.present());
    EXPECT_FALSE(paged.v_planes.mean.present());
}

TEST(Bases, SpendDigitsWhereTheMetricIsLarge) {
    const Text text(0.0f, 0.0f);
    Metric metric;
    metric[7].tokens = 1000;
    std::vector<double> m(32 * 32);
    for (int i = 0; i < 32; ++i) {
        m[size_t(i) * 33] = i == 10 ? 1e4 : 1.0;  // a channel of a twentieth of the largest variance
    }
    metric[7].heads.assign(2, {m, m});
    const LayerArtefact layer = text.fitted(std::vector{metric, metric});
    // The first direction is that channel, and its spectrum is in the unit of the metric.
    const auto encode = layer.k_planes.encode.head(0);
    int largest = 0;
    for (int i = 0; i < 32; ++i) {
        largest = std::abs(encode[size_t(i) * 32]) > std::abs(encode[size_t(largest) * 32]) ? i : largest;
    }
    EXPECT_EQ(largest, 10);
    EXPECT_NEAR(layer.k_planes.spectrum.head(0)[0], 1e4 * std::exp(-3.0), 0.3 * 1e4 * std::exp(-3.0));

    metric[7].heads.pop_back();
    EXPECT_TRUE(contains(error_of([&] { text.fitted(std::vector{metric}); }), "1 KV heads, the model 2"));
    EXPECT_TRUE(contains(error_of([&] { text.fitted(std::vector{Metric{}}); }), "0 KV heads"));
}

// Twice the planes of 2 bits lose less than a tenth of the error; channels that are always 0 do no harm.
TEST(Bases, CodeWhatTheyWereFittedOn) {
    Text text(1.0f, 0.5f);
    for (size_t i = 0; i < text.k.size(); i += 32) {
        text.k[i + 5] = text.v[i + 5] = 0.0f;
    }
    Artefact artefact;
    const int layers[] = {7};
    const Moments moments = text.observed(100, 1);
    add_planes(artefact, moments, layers, {}, 1);
    check(artefact, "artefact");
    const Recipe recipe = find_recipe("planes");
    double error[2] = {}, energy = 0;
    for (const int planes : {32, 64}) {
        PageFormat format{{.dim = 32, .planes = planes, .info = SideInfo::gain8}, {}};
        format.v = format.k;
        format.k.mean = artefact.layers[7].k_planes.page_step.present();
        format.v.mean = artefact.layers[7].v_planes.page_step.present();
        const auto tables = layer_tables(recipe, 7, 2, format, &artefact);
        for (const SamplePage& sample : moments.pages(7, 1).sample()) {
            std::vector<std::byte> page(format.bytes());
            EXPECT_EQ(encode_page(recipe, format, tables[1], sample.k, sample.v, page.data()).saturated, 0u);
            std::vector<float> k(64 * 32), v(64 * 32);
            decode_keys(format, tables[1].k, page.data(), k);
            decode_values(format, tables[1].v, page.data(), v);
            for (size_t i = 0; i < k.size(); ++i) {
                error[planes / 64] += std::pow(k[i] - to_float(sample.k[i]), 2) + std::pow(v[i] - to_float(sample.v[i]), 2);
                energy += planes == 32 ? std::pow(to_float(sample.k[i]) - 1, 2) + std::pow(to_float(sample.v[i]), 2) : 0.0;
            }
        }
    }
    EXPECT_LT(error[0], 0.05 * energy);
    EXPECT_LT(error[1], 0.1 * error[0]);
}

TEST(Pages, AreKeptWhateverTheBlocks) {
    const Text text(0.0f, 0.0f);
    const Moments moments = text.observed(100, 1);
    const PageSums& pages = moments.pages(7, 0);
    EXPECT_EQ(pages.key_moments(-1).pages, 24u);  // the first page of each of 8 sequences is skipped
    EXPECT_EQ(pages.key_moments(0).pages, 12u);
    ASSERT_EQ(pages.sample().size(), 24u);
    for (int i = 0; i < 32; ++i) {
        EXPECT_EQ(pages.sample()[3].k[i].bits, to_bf16(text.k[size_t(320) * 64 + i]).bits);  // page 1 of the second
    }
    EXPECT_EQ(pages.sample()[3].fold, 1);
}

}  // namespace
}  // namespace crumb
