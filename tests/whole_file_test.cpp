// Files that appear whole or not at all, and replace nothing but their own kind.
#include "base/whole_file.h"

#include <crumb/error.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iterator>

#include "files.h"

namespace crumb {
namespace {

namespace fs = std::filesystem;

class WholeFileTest : public FolderTest {
  protected:
    fs::path file(const std::string& name, const std::string& content) const {
        std::ofstream(folder_ / name) << content;
        return folder_ / name;
    }
    static std::string content(const fs::path& path) {
        std::ifstream in(path);
        return {std::istreambuf_iterator<char>(in), {}};
    }
    size_t files() const { return size_t(std::distance(fs::directory_iterator(folder_), {})); }
};

TEST_F(WholeFileTest, WhatIsNotCommittedLeavesNothing) {
    const auto path = file("a", "before");
    {
        WholeFile out(path);
        out.write(std::as_bytes(std::span("half", 4)));
    }
    EXPECT_EQ(content(path), "before");
    EXPECT_EQ(files(), 1u);
    write_whole_file(path, std::as_bytes(std::span("after", 5)));
    EXPECT_EQ(content(path), "after");
    EXPECT_EQ(files(), 1u);
}

TEST_F(WholeFileTest, ReplacesItsOwnKindOnly) {
    const auto ask = [](const fs::path& path) { require_replaceable(path, 2, "xy", "a test file"); };
    EXPECT_NO_THROW(ask(folder_ / "new"));
    EXPECT_NO_THROW(ask(file("empty", "")));
    EXPECT_NO_THROW(ask(file("own", "..xy and more")));
    for (const char* other : {"GGUF and weights", "..x", ".", "xy"}) {
        EXPECT_THROW(ask(file("other", other)), Error) << other;
        EXPECT_EQ(content(folder_ / "other"), other);
    }
    EXPECT_THROW(ask(folder_), Error);
    EXPECT_THROW(ask(folder_ / "missing" / "new"), Error);
    EXPECT_EQ(files(), 3u) << "asking leaves no file behind";
}

TEST_F(WholeFileTest, RemovesWhatAKilledProcessLeft) {
    const auto dead_process = [] {
        const pid_t child = fork();
        if (child == 0) { _exit(0); }
        waitpid(child, nullptr, 0);
        return child;
    };
    const auto temporary = [&](const std::string& name, auto process, std::chrono::minutes age) {
        const auto path = file(fmt::format("{}.{}.tmp", name, process), "half");
        fs::last_write_time(path, fs::file_time_type::clock::now() - age);
        return path;
    };
    using std::chrono::minutes;
    const auto left = temporary("a", dead_process(), minutes(60)), young = temporary("a", dead_process(), minutes(0)),
               of_another = temporary("b", dead_process(), minutes(60)), alive = temporary("a", getppid(), minutes(60)),
               of_nobody = temporary("a", "x", minutes(60));
    write_whole_file(folder_ / "a", "whole");
    EXPECT_FALSE(fs::exists(left));
    for (const auto& stays : {young, of_another, alive, of_nobody, folder_ / "a"}) { EXPECT_TRUE(fs::exists(stays)) << stays; }
}

TEST_F(WholeFileTest, WritesBehindALinkAndKeepsTheMode) {
    fs::create_directory(folder_ / "far");
    const auto target = file("far/target", "before"), link = folder_ / "link", ahead = folder_ / "ahead";
    fs::permissions(target, fs::perms(0600));
    fs::create_symlink("far/target", link);
    fs::create_symlink(folder_ / "far" / "later", ahead);  // to what is not there yet
    write_whole_file(link, "after");
    write_whole_file(ahead, "new");
    EXPECT_TRUE(fs::is_symlink(link));
    EXPECT_TRUE(fs::is_symlink(ahead));
    EXPECT_EQ(content(target), "after");
    EXPECT_EQ(fs::status(target).permissions(), fs::perms(0600));
    EXPECT_EQ(content(folder_ / "far" / "later"), "new");
    fs::create_symlink("circle", folder_ / "circle");
    EXPECT_TRUE(contains(error_of([&] { write_whole_file(folder_ / "circle", "x"); }), "leads to itself"));
}

TEST_F(WholeFileTest, LeavesAloneWhatIsNoFile) {
    const auto pipe = folder_ / "pipe", link = folder_ / "link";
    ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
    fs::create_symlink(pipe, link);
    for (const auto& path : {pipe, link}) {
        EXPECT_TRUE(contains(error_of([&] { write_whole_file(path, "x"); }), "a device or a pipe"));
        EXPECT_TRUE(contains(error_of([&] { require_replaceable(path, 0, "x", "a test file"); }), "a device or a pipe"));
    }
    EXPECT_TRUE(fs::is_fifo(pipe));
    EXPECT_TRUE(contains(error_of([] { write_whole_file("-", "x"); }), "standard output"));
    EXPECT_EQ(files(), 2u);
}

TEST_F(WholeFileTest, OutputsOfOneCommandDiffer) {
    const auto a = folder_ / "a";
    fs::create_symlink("a", folder_ / "link");
    for (const auto& same : {a, folder_ / ".." / folder_.filename() / "a", folder_ / "link"}) {
        EXPECT_TRUE(contains(error_of([&] { require_different({{"--json", a}, {"--html", same}}); }), "--json and --html are the same file"));
    }
    EXPECT_NO_THROW(require_different({{"--json", a}, {"--html", folder_ / "b"}, {"-o", {}}, {"--checkpoint", {}}}));
    EXPECT_TRUE(contains(error_of([] { require_different({{"-o", "here"}, {"--svg", "./here"}}); }), "the same file"));
}

}  // namespace
}  // namespace crumb
