// What tests of files share: a folder of their own, and the text of an error.
#pragma once

#include <crumb/error.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace crumb {

inline std::string error_of(const auto& f) {
    try {
        f();
    } catch (const Error& e) {
        return e.what();
    }
    return "no error";
}

// Prints both texts if it does not.
inline bool contains(const std::string& text, const std::string& part) {
    const bool found = text.find(part) != std::string::npos;
    if (!found) {
        std::printf("'%s' lacks '%s'\n", text.c_str(), part.c_str());
    }
    return found;
}

class FolderTest : public testing::Test {
  protected:
    FolderTest() { std::filesystem::create_directories(folder_); }
    ~FolderTest() override { std::filesystem::remove_all(folder_); }

    const std::filesystem::path folder_ =
        std::filesystem::path(testing::TempDir()) /
        fmt::format("crumb-{}-{}", testing::UnitTest::GetInstance()->current_test_info()->name(), getpid());
};

}  // namespace crumb
