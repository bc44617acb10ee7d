// Figures against obvious implementations, fronts, and what a run leaves behind when it is killed.
#include "eval/ledger.h"
#include "eval/line_file.h"

#include <crumb/error.h>
#include <crumb/eval.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cmath>
#include <fstream>
#include <random>

#include "files.h"

namespace crumb {
namespace {

std::filesystem::path scratch(const std::string& name) {
    const auto path = std::filesystem::path(testing::TempDir()) / (name + std::to_string(getpid()));
    std::filesystem::remove(path);
    return path;
}

struct Text {
    std::vector<std::vector<float>> base, other;
    std::vector<int32_t> next;
};

Text random_text(size_t positions, size_t vocabulary, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Text text;
    for (size_t i = 0; i < positions; ++i) {
        auto& base = text.base.emplace_back(vocabulary);
        auto& other = text.other.emplace_back(vocabulary);
        const float noise = 0.05f + 0.5f * std::abs(normal(random));
        for (size_t v = 0; v < vocabulary; ++v) {
            base[v] = 3 * normal(random);
            other[v] = base[v] + noise * normal(random);
        }
        text.next.push_back(int32_t(random() % vocabulary));
    }
    return text;
}

std::vector<double> softmax(const std::vector<float>& logits) {
    double sum = 0;
    for (const float x : logits) { sum += std::exp(double(x)); }
    std::vector<double> p;
    for (const float x : logits) { p.push_back(std::exp(double(x)) / sum); }
    return p;
}

TEST(Divergence, IsWhatTheDefinitionsSay) {
    const size_t n = 700;
    const Text text = random_text(n, 40, 1);
    DivergenceSum sum;
    std::vector<double> kld;
    double total = 0, nll = 0, nll_base = 0, same = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto p = softmax(text.base[i]), q = softmax(text.other[i]);
        double d = 0;
        for (size_t v = 0; v < p.size(); ++v) { d += p[v] * std::log(p[v] / q[v]); }
        kld.push_back(d);
        total += d;
        nll -= std::log(q[text.next[i]]);
        nll_base -= std::log(p[text.next[i]]);
        same += std::ranges::max_element(p) - p.begin() == std::ranges::max_element(q) - q.begin();
        EXPECT_NEAR(sum.add(text.base[i], text.other[i], text.next[i]), d, 1e-5);
    }
    std::ranges::sort(kld);
    const Divergence d = sum.result();
    EXPECT_EQ(d.positions, n);
    EXPECT_EQ(d.blocks, 3u);
    EXPECT_NEAR(d.mean_kld.value, total / n, 1e-6);
    EXPECT_NEAR(d.ppl, std::exp(nll / n), 1e-3);
    EXPECT_NEAR(d.ppl_base, std::exp(nll_base / n), 1e-3);
    EXPECT_NEAR(d.ppl_ratio.value, std::exp((nll - nll_base) / n), 1e-6);
    EXPECT_DOUBLE_EQ(d.same_top.value, same / n);
    EXPECT_NEAR(d.kld_90.value, kld[size_t(0.9 * n)], 1e-6);
    EXPECT_NEAR(d.kld_99.value, kld[size_t(0.99 * n)], 1e-6);
    EXPECT_NEAR(d.kld_999.value, kld[size_t(0.999 * n)], 1e-6);
    EXPECT_NEAR(d.median_kld, kld[n / 2], 1e-6);
    EXPECT_NEAR(d.max_kld, kld.back(), 1e-6);
}

// Batch means: the deviation of block means over the root of their number, which a bootstrap of a mean comes to, less
// sqrt((n - 1) / n) and what 500 draws leave to chance.
TEST(Divergence, ErrorOfTheMeanIsThatOfBatchMeans) {
    std::mt19937 random(2);
    std::exponential_distribution<float> heavy(1);
    std::vector<Block> blocks(60);
    double mean = 0, squares = 0;
    for (auto& block : blocks) {
        const float level = heavy(random);  // positions of a block share it
        for (size_t i = 0; i < kBlockPositions; ++i) { block.kld.push_back(level * heavy(random)); }
        for (const float x : block.kld) { block.sum_kld += x; }
        mean += block.sum_kld / kBlockPositions / double(blocks.size());
    }
    for (const auto& block : blocks) { squares += std::pow(block.sum_kld / kBlockPositions - mean, 2); }
    const double batch_means = std::sqrt(squares / double(blocks.size() - 1) / double(blocks.size()));
    const Divergence d = DivergenceSum(blocks).result();
    EXPECT_NEAR(d.mean_kld.error / batch_means, 1, 0.12);
    double independent = 0;
    for (const auto& block : blocks) {
        for (const float x : block.kld) { independent += (x - mean) * (x - mean); }
    }
    independent = std::sqrt(independent) / double(d.positions);
    EXPECT_GT(d.mean_kld.error, 4 * independent);  // what taking positions for independent would claim
    EXPECT_GT(d.kld_99.error, 0);
    EXPECT_EQ(DivergenceSum(blocks).result().kld_999.error, d.kld_999.error);
}

TEST(Divergence, OneBlockHasNoError) {
    const Text text = random_text(10, 8, 3);
    DivergenceSum sum;
    for (size_t i = 0; i < 10; ++i) { sum.add(text.base[i], text.other[i], text.next[i]); }
    EXPECT_TRUE(std::isnan(sum.result().mean_kld.error));
    EXPECT_EQ(DivergenceSum().result().positions, 0u);
}

TEST(Divergence, WindowsKeepTheirOwnBlocks) {
    const Text text = random_text(300, 8, 4);
    DivergenceSum one, two, both;
    for (size_t i = 0; i < 300; ++i) { (i < 260 ? one : two).add(text.base[i], text.other[i], text.next[i]); }
    both.merge(one);
    both.merge(two);
    EXPECT_EQ(both.blocks().size(), 3u);
    EXPECT_EQ(both.result().positions, 300u);
    EXPECT_NEAR(both.result().mean_kld.value, (260 * one.result().mean_kld.value + 40 * two.result().mean_kld.value) / 300, 1e-12);
}

TEST(Divergence, OfAnyVocabularyAndOfTokensThatAreForbidden) {
    for (const size_t vocabulary : {1u, 2u, 15u, 16u, 17u, 1000u}) {
        Text text = random_text(1, vocabulary, unsigned(vocabulary));
        for (size_t v = 1; v < vocabulary; v += 3) {
            text.base[0][v] = text.other[0][v] = -std::numeric_limits<float>::infinity();
        }
        const std::vector<double> p = softmax(text.base[0]), q = softmax(text.other[0]);
        double kld = 0;
        for (size_t v = 0; v < vocabulary; ++v) { kld += p[v] > 0 ? p[v] * std::log(p[v] / q[v]) : 0; }
        DivergenceSum sum;
        EXPECT_NEAR(sum.add(text.base[0], text.other[0], 0), kld, 1e-6) << vocabulary;
    }
}

TEST(Divergence, RefusesLogitsThatAreNotFinite) {
    const std::vector<float> good = {1, 2, 3}, bad = {1, NAN, 3};
    DivergenceSum sum;
    EXPECT_THROW(sum.add(good, bad, 0), Error);
    EXPECT_THROW(sum.add(bad, good, 0), Error);
    // Sums that are finite, and a token that one side forbids.
    const std::vector<float> without = {1, -INFINITY, 3};
    EXPECT_TRUE(contains(error_of([&] { sum.add(good, without, 0); }), "divergence is inf"));
    EXPECT_TRUE(contains(error_of([&] { sum.add(without, good, 1); }), "costs inf nats at 16 bit"));
    EXPECT_TRUE(sum.blocks().empty());
}

RC_GTEST_PROP(Pareto, IsWhatNobodyBeats, ()) {
    std::vector<RateLoss> points;
    for (const auto& [rate, loss] : *rc::gen::container<std::vector<std::pair<int, int>>>(rc::gen::pair(rc::gen::inRange(0, 8), rc::gen::inRange(0, 8)))) {
        points.push_back({double(rate), double(loss)});
    }
    std::vector<size_t> expected;
    for (size_t i = 0; i < points.size(); ++i) {
        bool beaten = false;
        for (size_t j = 0; j < points.size(); ++j) {
            const bool no_worse = points[j].rate <= points[i].rate && points[j].loss <= points[i].loss;
            const bool equal = points[j].rate == points[i].rate && points[j].loss == points[i].loss;
            beaten = beaten || (no_worse && (!equal || j < i));
        }
        if (!beaten) { expected.push_back(i); }
    }
    std::ranges::sort(expected, {}, [&](size_t i) { return points[i].rate; });
    RC_ASSERT(pareto_front(points) == expected);
}

TEST(LineFile, IsWholeAfterAKill) {
    const auto path = scratch("killed");
    const pid_t child = fork();
    if (child == 0) {
        LineFile file(path, "");
        for (int i = 0;; ++i) { file.append(std::to_string(i) + std::string(20000, 'x')); }
    }
    while (!std::filesystem::exists(path) || std::filesystem::file_size(path) < 200000) { usleep(1000); }
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);

    size_t whole = 0;
    {
        LineFile file(path, "");
        whole = file.lines().size();
        ASSERT_GE(whole, 9u);
        for (size_t i = 0; i < whole; ++i) { ASSERT_EQ(file.lines()[i], std::to_string(i) + std::string(20000, 'x')); }
        file.append("after");
    }
    std::ofstream(path, std::ios::app) << "half a li";  // what a kill between two writes of a line leaves
    LineFile file(path, "0x");
    EXPECT_EQ(file.lines().size(), whole + 1);
    EXPECT_EQ(file.lines().back(), "after");
}

TEST(LineFile, HasOneWriterAndSaysWhatIsWrong) {
    const auto path = scratch("locked");
    {
        const LineFile file(path, "");
        EXPECT_THROW(LineFile(path, ""), Error);
    }
    EXPECT_NO_THROW(LineFile(path, ""));
    EXPECT_THROW(LineFile("/nonexistent/file", ""), Error);
}

TEST(LineFile, LeavesAFileOfSomethingElseAsItIs) {
    const auto path = scratch("model");
    std::ofstream(path) << "GGUF and no end of line";
    EXPECT_THROW(LineFile(path, "{\""), Error);
    EXPECT_THROW(Ledger{path}, Error);
    std::ofstream(path) << "{\"name\": \"package\"}\n{\"and\"";
    EXPECT_THROW(Ledger{path}, Error);
    EXPECT_EQ(std::filesystem::file_size(path), 26u);
}

Key key(const std::string& recipe) { return {{"model", "m"}, {"recipe", recipe}, {"context", "512"}}; }

TEST(Ledger, LeavesNoFileIfNothingWasMeasured) {
    const auto path = scratch("nothing");
    { const Ledger ledger(path); }
    EXPECT_FALSE(std::filesystem::exists(path));
    std::ofstream(path) << "";
    { const Ledger ledger(path); }
    EXPECT_TRUE(std::filesystem::exists(path)) << "it was there before";
}

TEST(LineFile, WritesBehindALinkAndLeavesAloneWhatIsNoFile) {
    const auto path = scratch("target"), link = scratch("link"), pipe = scratch("pipe");
    std::filesystem::create_symlink(path, link);
    { LineFile(link, "").append("line"); }
    EXPECT_TRUE(std::filesystem::is_symlink(link));
    EXPECT_EQ(std::filesystem::file_size(path), 5u);
    ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
    EXPECT_TRUE(contains(error_of([&] { LineFile(pipe, ""); }), "a device or a pipe"));
    EXPECT_TRUE(std::filesystem::is_fifo(pipe));
}

TEST(Ledger, GivesBackExactlyWhatWasMeasured) {
    const auto path = scratch("ledger");
    const Text text = random_text(600, 30, 5);
    DivergenceSum sum;
    for (size_t i = 0; i < 600; ++i) { sum.add(text.base[i], text.other[i], text.next[i]); }
    const std::vector<Answer> answers = {{0.25, true, 0.125}, {0.75, false, 3.5}};
    const TrajectoryRecord trajectory{{5, 6, 7}, {true, false, true}, {10, 20}};
    Key greedy = key("a");
    greedy["generate"] = "3";
    const std::vector<KeyShape> shapes = {{3, 1, 12.5, 0.75, 4.5, {2, 1, 0.5}}};
    {
        Ledger ledger(path);
        ledger.add(key("a"), WindowRecord{sum, {100.5, 12.25}});
        ledger.add(key("a"), answers);
        ledger.add(greedy, trajectory);
        ledger.add(key("a"), shapes);
        EXPECT_EQ(ledger.size(), 4u);
    }
    const Ledger ledger(path);
    const auto window = ledger.window(key("a"));
    ASSERT_TRUE(window);
    EXPECT_EQ(window->divergence.blocks(), sum.blocks());
    EXPECT_EQ(window->speed.generated, 12.25);
    EXPECT_EQ(ledger.retrieval(key("a"))->at(1).nll, 3.5);
    EXPECT_TRUE(ledger.retrieval(key("a"))->at(0).right);
    EXPECT_EQ(ledger.trajectory(greedy)->agrees, trajectory.agrees);
    EXPECT_EQ(ledger.trajectory(greedy)->tokens, trajectory.tokens);
    EXPECT_EQ(*ledger.keys(key("a")), shapes);
}

TEST(Ledger, NeverMixesSettings) {
    Ledger ledger(scratch("settings"));
    ledger.add(key("a"), WindowRecord{{}, {1, 1}});
    EXPECT_FALSE(ledger.window(key("b")));
    EXPECT_FALSE(ledger.retrieval(key("a")));
    Key other = key("a");
    other["context"] = "1024";
    EXPECT_FALSE(ledger.window(other));
    other = key("a");
    other["sink"] = "64";
    EXPECT_FALSE(ledger.window(other));
}

TEST(Ledger, NamesTheLineThatIsNotItsOwn) {
    const auto path = scratch("foreign");
    const std::string block = R"({"kld":0.5,"nll_base":1,"nll":1.5,"same_top":1,"positions":"3f000000"})";
    const auto window = [&](std::string blocks) { return R"({"kind":"window","key":{"a":"b"},"speed":{"prompt":1,"generated":1},"blocks":[)" + blocks + "]}"; };
    const auto with = [&](const std::string& from, const std::string& to) { return window(std::string(block).replace(block.find(from), from.size(), to)); };
    const auto greedy = [](const std::string& key, const std::string& tokens, const std::string& agrees) {
        return R"({"kind":"trajectory","key":{)" + key + R"(},"speed":{"prompt":1,"generated":1},"tokens":)" + tokens + R"(,"agrees":")" + agrees + "\"}";
    };
    std::ofstream(path) << window(block) << "\n\n";
    EXPECT_EQ(Ledger(path).size(), 1u) << "a blank last line is none";
    const std::pair<std::string, std::string> wrong[] = {
        {"hello", "parse error"},
        {R"({"key":{}})", "kind"},
        {R"({"kind":"window","speed":{"prompt":1,"generated":1},"blocks":[)" + block + "]}", "key"},
        {R"({"kind":"sorcery","key":{}})", "no kind 'sorcery'"},
        {window(""), "at least one"},
        {with("0.5", "null"), "kld is null"},
        {with("1.5", "\"1\""), "nll is \"1\""},
        {with("\"same_top\":1", "\"same_top\":-1"), "same_top is -1"},
        {with("\"same_top\":1", "\"same_top\":2"), "from 0 to 1"},
        {with("3f000000", ""), "0 positions"},
        {with("3f000000", "7fc00000"), "divergence of nan"},
        {with("3f000000", "3f00"), "no float"},
        {R"({"kind":"retrieval","key":{},"answers":[{"depth":2,"right":true,"nll":1}]})", "depth is 2"},
        {greedy(R"("generate":"2")", "[5]", ""), "2 tokens were to be generated, and 1"},
        {greedy(R"("generate":"2","follow":"x")", "[]", "1"), "2 tokens were to be generated, and 1"},
        {greedy(R"("generate":"1","follow":"x")", "[]", "2"), "of 0 and 1"},
        {greedy(R"("generate":"1")", "[-5]", ""), "-5 is no token"},
        {R"({"kind":"keys","key":{},"heads":[{"layer":-1,"head":0,"norm":1,"mean_share":0,"unevenness":1,"spectrum":[1]}]})", "layer is -1"},
    };
    for (const auto& [line, what] : wrong) {
        std::ofstream(path) << window(block) << "\n" << line << "\n";
        const std::string error = error_of([&] { Ledger{path}; });
        EXPECT_TRUE(contains(error, path.string() + ":2: ")) << line;
        EXPECT_TRUE(contains(error, what)) << line;
    }
}

TEST(Ledger, KeepsNamesOfAnyBytes) {
    const auto path = scratch("names");
    const Key name = {{"text", "lat\xe9"}};
    { Ledger(path).add(name, std::vector<Answer>{{0.5, true, 1}}); }
    EXPECT_TRUE(Ledger(path).retrieval(name));
}

}  // namespace
}  // namespace crumb
