// The page is well-formed, needs nothing from elsewhere and no script, and shows what it was given.
#include "eval/plot.h"
#include "eval/report.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace crumb {
namespace {

// Everything that a page can hold, with names that need escaping, figures without error and figures that are nothing.
Verdict example() {
    Verdict v;
    v.model = "a<b> & \"c\".gguf (llama)";
    v.setting = {"sink 64 + recent 256", "5 < 6 & 7 > 6"};
    v.notes = {"left out x: because <this> & that"};
    for (const int context : {2048, 8192}) {
        for (const char* text : {"docs", "prose & co", "all"}) {
            v.rows.push_back({"16 bit", text, context, {16, 16, 1 << 20, 1 << 20}, {100, 10}, {}, std::nullopt, false});
            v.rows.back().divergence.ppl_base = 7.5;
            for (int r = 0; r < 18; ++r) {
                Row row{"recipe" + std::to_string(r), text, context, {2.0 + 0.1 * r, 2.5 + 0.1 * r, size_t(200000 + 10000 * r), 1 << 20}, {90, 9}, {}, 0.0, false};
                row.divergence.mean_kld = {0.3 / (1 + (r * 7) % 18), r == 3 ? std::nan("") : 0.01};
                row.divergence.kld_99 = {1.5, 0.2};
                row.divergence.ppl_ratio = {1.01, 0.001};
                row.divergence.same_top = {0.95, 0.002};
                if (r == 4) { row.calibrated_on = 0.4; }
                if (r == 5) { row.divergence.mean_kld = {0, 0}; }
                v.rows.push_back(row);
            }
        }
    }
    mark_fronts(v.rows);
    for (int layer = 0; layer < 30; ++layer) {
        for (const char* part : {"K", "V"}) { v.parts.push_back({"recipe<1>", part, layer, 1024, {}}), v.parts.back().divergence.mean_kld = {0.001 * layer, 1e-4}; }
        for (int head = 0; head < 2; ++head) { v.keys.push_back({layer, head, 10.0 + layer, 0.02 * layer, 1.0 + head, {3, 2, 1, 0.1}}); }
    }
    v.keys.push_back({30, 0, 0, 0, 0, {}});
    v.parts.push_back({"recipe<1>", "no windows", -1, 1024, {}});
    for (const char* recipe : {"16 bit", "recipe<1>"}) {
        RetrievalRow row{recipe, "multi-key", 2048, {}, {}, {}};
        for (int i = 0; i < 32; ++i) {
            const Answer answer{i / 32.0, i % 3 != 0, 0.1};
            row.all.add(answer);
            if (i < 28) { row.by_depth[i / 4].add(answer); }
        }
        v.retrieval.push_back(row);
        v.trajectories.push_back({recipe, "docs", 2048, {}, {1, 2}, 500, 123, 0.875});
    }
    return v;
}

// Python's XML parser for the form; its HTML parser for what must not be there.
TEST(Report, ThePageIsWellFormedAndStandsAlone) {
    const auto path = std::filesystem::path(testing::TempDir()) / ("page" + std::to_string(getpid()) + ".html");
    std::ofstream(path) << page(example());
    const auto script = path.string() + ".py";
    std::ofstream(script) << R"(
import sys, xml.etree.ElementTree as E
from html.parser import HTMLParser
text = open(sys.argv[1], encoding='utf-8').read()
root = E.fromstring(text)
assert root.tag.endswith('html') and len(list(root.iter())) > 500
assert 'nan' not in text and 'inf<' not in text and 'inf"' not in text
class Alone(HTMLParser):
    def handle_starttag(self, tag, attributes):
        assert tag not in ('script', 'link', 'img', 'iframe', 'object'), tag
        for name, value in attributes:
            assert name not in ('src', 'href', 'onclick', 'onload', 'style'), (tag, name)
            assert '//' not in (value or '') or name == 'xmlns', (tag, name, value)
    def handle_data(self, data):
        assert 'url(' not in data and '@import' not in data
Alone().feed(text)
assert 'name="viewport"' in text and 'prefers-color-scheme: dark' in text
ids = [c.get('d') for c in root.iter()]
svgs = [s for s in root.iter('{http://www.w3.org/2000/svg}svg')]
assert len(svgs) >= 6, len(svgs)
for svg in svgs:
    _, _, width, height = map(float, svg.get('viewBox').split())
    for t in svg.iter('{http://www.w3.org/2000/svg}circle'):
        assert 0 <= float(t.get('cx')) <= width and 0 <= float(t.get('cy')) <= height
    for t in svg.iter('{http://www.w3.org/2000/svg}rect'):
        assert 0 <= float(t.get('x')) and float(t.get('x')) + float(t.get('width')) <= width + 1
        assert 0 <= float(t.get('y')) and float(t.get('y')) + float(t.get('height')) <= height + 1
)";
    EXPECT_EQ(std::system(("python3 '" + script + "' '" + path.string() + "'").c_str()), 0);
}

TEST(Report, AnEmptyVerdictIsAPageToo) {
    EXPECT_NE(page({}).find("</html>"), std::string::npos);
    EXPECT_EQ(terminal({}).find("nan"), std::string::npos);
}

TEST(Report, FrontsAreOfOneTextAndContext) {
    auto v = example();
    for (const auto& row : v.rows) {
        if (row.recipe == "16 bit") { EXPECT_FALSE(row.front); }
        if (row.recipe == "recipe0" || row.recipe == "recipe5") { EXPECT_TRUE(row.front) << row.recipe; }
    }
}

TEST(Report, TablesLineUpAndJsonIsALineARow) {
    const auto v = example();
    const std::string text = terminal(v);
    size_t bars = 0;
    for (size_t at = text.find("| recipe "), end = 0; text[at] == '|'; at = end + 1) {
        end = text.find('\n', at);
        const auto n = size_t(std::count(text.begin() + at, text.begin() + end, '|'));
        EXPECT_EQ(n, bars ? bars : n);
        bars = n;
    }
    const std::string lines = json_lines(v);
    EXPECT_EQ(size_t(std::ranges::count(lines, '\n')), 1 + v.rows.size() + v.parts.size() + v.retrieval.size() + v.trajectories.size() + v.keys.size());
}

TEST(Plot, PlacesFollowTheAxes) {
    const Plot linear("", {"x", 0, 10, false}, {"y", 0.01, 1, true}, 260);
    EXPECT_DOUBLE_EQ(linear.x(0), Plot::kLeft);
    EXPECT_DOUBLE_EQ(linear.x(10), Plot::kWidth - Plot::kRight);
    EXPECT_NEAR(linear.y(0.1), (linear.y(0.01) + linear.y(1)) / 2, 1e-9);
    EXPECT_DOUBLE_EQ(linear.y(0), linear.y(0.01));
    const Axis axis = axis_around("", {3, 17, std::nan("")}, false);
    EXPECT_EQ(axis.low, 0);
    EXPECT_GE(axis.high, 17);
    EXPECT_LE(axis.high, 20);
    EXPECT_GT(axis_around("", {}, false).high, 0);
    EXPECT_GT(axis_around("", {0, 0}, true).high, axis_around("", {0, 0}, true).low);
}

TEST(Plot, LabelsNeverOverlap) {
    Plot plot("", {"x", 0, 1, false}, {"y", 0, 1, false}, 260);
    for (int i = 0; i < 40; ++i) { plot.point(0.5, 0.5 + 0.001 * i, "other", ""); }
    for (int i = 0; i < 40; ++i) { plot.label(0.5, 0.5 + 0.001 * i, "name" + std::to_string(i), "other"); }
    size_t labels = 0;
    const std::string svg = plot.svg();
    for (size_t at = 0; (at = svg.find("class=\"label", at)) != std::string::npos; ++at) { ++labels; }
    EXPECT_GE(labels, 2u);
    EXPECT_LE(labels, 8u);
}

}  // namespace
}  // namespace crumb
