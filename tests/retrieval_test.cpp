// Haystacks, with a tokenizer of bytes: what is in them can be read.
#include "eval/retrieval.h"

#include <crumb/error.h>

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace crumb {
namespace {

std::vector<int32_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string text(std::span<const int32_t> tokens) { return {tokens.begin(), tokens.end()}; }

std::vector<std::string> hay() {
    std::string all;
    for (int i = 0; i < 50; ++i) { all += "Paragraph " + std::to_string(i) + " begins.\n" + std::string(300, char('a' + i % 26)) + " ends.\n\n"; }
    return paragraphs(all + "short\n\n" + std::string(2000, 'z'));
}

TEST(Retrieval, ParagraphsAreOfUsefulLength) {
    EXPECT_EQ(hay().size(), 50u);
    EXPECT_EQ(hay()[0].find('\n'), std::string::npos);
    EXPECT_TRUE(paragraphs("").empty());
}

class Haystacks : public testing::TestWithParam<Probe> {};

TEST_P(Haystacks, HoldTheFactsOfTheirQuestions) {
    const std::vector<int32_t> begin = {1};
    for (const int length : {8000, 20000}) {
        for (const uint64_t seed : {1, 2}) {
            const Haystack h = build_haystack(GetParam(), length, seed, hay(), begin, bytes);
            const std::string prefix = text(h.prefix);
            EXPECT_EQ(h.prefix[0], 1);
            size_t longest = 0, needles = 0;
            std::set<int> bins;
            for (const auto& q : h.questions) {
                longest = std::max(longest, q.prompt.size() + q.answer.size());
                const std::string answer = text(q.answer);
                for (size_t at = 0; at < answer.size(); at += 7) {
                    const std::string number = answer.substr(at, 5);
                    EXPECT_NE(prefix.find(" is " + number + ".\n\n"), std::string::npos) << number;
                    ++needles;
                }
                // The depth is where its first number stands, or, for a chain, begins.
                const size_t at = prefix.find(answer.substr(0, 5));
                EXPECT_NEAR(q.depth, double(at) / double(prefix.size()), 0.02);
                bins.insert(int(q.depth * 8));
                const std::string prompt = text(q.prompt);
                EXPECT_EQ(prompt.substr(prompt.size() - 1), " ");
                EXPECT_EQ(prompt.find(answer), std::string::npos);
            }
            EXPECT_EQ(h.prefix.size() + longest, size_t(length));
            EXPECT_GE(needles, 8u);
            EXPECT_GE(bins.size(), GetParam() == Probe::multi_value ? 2u : 6u);
        }
    }
    const Haystack a = build_haystack(GetParam(), 8000, 1, hay(), {}, bytes), b = build_haystack(GetParam(), 8000, 1, hay(), {}, bytes);
    EXPECT_EQ(a.prefix, b.prefix);
    EXPECT_NE(a.prefix, build_haystack(GetParam(), 8000, 2, hay(), {}, bytes).prefix);
}

TEST_P(Haystacks, SayWhenThereIsNoRoomOrNoHay) {
    EXPECT_THROW(build_haystack(GetParam(), 100, 1, hay(), {}, bytes), Error);
    EXPECT_THROW(build_haystack(GetParam(), 20000, 1, {}, {}, bytes), Error);
}

INSTANTIATE_TEST_SUITE_P(Retrieval, Haystacks, testing::ValuesIn(kProbes));

TEST(Retrieval, AChainIsHandedOn) {
    const Haystack h = build_haystack(Probe::tracing, 20000, 3, hay(), {}, bytes);
    const std::string prefix = text(h.prefix), prompt = text(h.questions[0].prompt);
    std::string name = prompt.substr(prompt.rfind("value of ") + 9);
    name = name.substr(0, name.find(' '));
    for (int hop = 0; hop < 2; ++hop) {
        const std::string fact = "The value of " + name + " is the value of ";
        const size_t at = prefix.find(fact);
        ASSERT_NE(at, std::string::npos) << fact;
        name = prefix.substr(at + fact.size(), prefix.find('.', at) - at - fact.size());
    }
    EXPECT_NE(prefix.find("The value of " + name + " is " + text(h.questions[0].answer) + "."), std::string::npos);
}

TEST(Retrieval, KeysAreThirtyTwoCodesOfFiveDigits) {
    const Haystack h = build_haystack(Probe::multi_key, 20000, 4, hay(), {}, bytes);
    std::set<std::string> codes;
    for (const auto& q : h.questions) { codes.insert(text(q.answer)); }
    EXPECT_EQ(h.questions.size(), 32u);
    EXPECT_EQ(codes.size(), 32u);
    for (const auto& code : codes) { EXPECT_EQ(code.size(), 5u); }
}

TEST(Retrieval, JudgesOneToken) {
    const std::vector<float> logits = {0, 2, 1};
    EXPECT_TRUE(judge(logits, 1).top);
    EXPECT_FALSE(judge(logits, 2).top);
    EXPECT_NEAR(judge(logits, 2).nll, std::log(std::exp(-1.0) + std::exp(1.0) + 1), 1e-6);
    EXPECT_THROW(judge(std::vector<float>{0, INFINITY}, 0), Error);
}

TEST(Retrieval, ProbesHaveNames) {
    for (const Probe probe : kProbes) { EXPECT_EQ(find_probe(name(probe)), probe); }
    EXPECT_THROW(find_probe("needle"), Error);
}

}  // namespace
}  // namespace crumb
