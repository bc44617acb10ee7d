// Files that appear whole or not at all: written under a temporary name in the same folder, flushed to the disk,
// renamed. An output is a regular file: a symbolic link to one stays a link, a file that is replaced keeps its mode,
// and devices, pipes and folders are refused, since a rename would put a file where they are. What a killed process left
// goes when the file is written next.
#pragma once

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <initializer_list>
#include <span>
#include <string_view>
#include <vector>

namespace crumb {

// Where an output of this name lies: links are followed, also to what is not there yet. Throws Error if that is no
// regular file, or what this process prints to.
std::filesystem::path output_file(const std::filesystem::path& name);

// What is written, each with the flag or the words that a user knows it by; an empty path is none.
struct NamedOutput {
    std::string_view name;
    std::filesystem::path file;
};
// Throws Error if two lie at the same place. Asked before the work.
void require_different(std::initializer_list<NamedOutput> outputs);

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
inline void write_whole_file(const std::filesystem::path& file, std::string_view text) {
    write_whole_file(file, std::as_bytes(std::span(text)));
}

// A file may replace one of its own kind, or an empty one, and nothing else: `-o model.gguf` by mistake must not cost the
// model. Throws Error unless `file` can be made, or starts with `magic` at byte `offset`. Asked before the work whose
// result will be written.
void require_replaceable(const std::filesystem::path& file, size_t offset, std::string_view magic, const char* what);

// Throws Error if there is no such regular file, or it has more than `limit` bytes; `what` names the kind of file.
std::vector<std::byte> read_whole_file(const std::filesystem::path& file, const char* what, size_t limit);

}  // namespace crumb
