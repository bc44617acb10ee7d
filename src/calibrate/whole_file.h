// Files that appear whole or not at all: written under a temporary name in the same folder, flushed to the disk,
// renamed.
#pragma once

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

namespace crumb {

class WholeFile {
  public:
    // Throws Error if the folder cannot be written to.
    explicit WholeFile(std::filesystem::path file);
    ~WholeFile();  // without commit(): nothing remains
    WholeFile(const WholeFile&) = delete;
    WholeFile& operator=(const WholeFile&) = delete;

    void write(std::span<const std::byte> bytes);
    void commit();

    const std::filesystem::path& temporary() const { return temporary_; }

  private:
    std::filesystem::path file_, temporary_;
    std::FILE* stream_ = nullptr;
};

void write_whole_file(const std::filesystem::path& file, std::span<const std::byte> bytes);

// A file may replace one of its own kind, or an empty one, and nothing else: `-o model.gguf` by mistake must not cost the
// model. Throws Error unless `file` can be made, or starts with `magic` at byte `offset`. Asked before the work whose
// result will be written.
void require_replaceable(const std::filesystem::path& file, size_t offset, std::string_view magic, const char* what);

// Throws Error if there is no such regular file, or it has more than `limit` bytes; `what` names the kind of file.
std::vector<std::byte> read_whole_file(const std::filesystem::path& file, const char* what, size_t limit);

}  // namespace crumb
