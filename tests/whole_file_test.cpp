// Files that appear whole or not at all, and replace nothing but their own kind.
#include "calibrate/whole_file.h"

#include <crumb/error.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace crumb
