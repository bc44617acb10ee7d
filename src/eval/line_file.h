// A file of lines that only grows: what a run has measured so far. A line is written with one call and flushed to the disk;
// whoever is killed in the middle leaves at most an unfinished last line, which the next one to write cuts off. One process
// writes at a time: the file is locked while it is open. Nothing is changed before the first line is appended, so that a
// wrong file name costs nothing, and a file that was made and got no line goes away with its owner.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace crumb {

class LineFile {
  public:
    // Creates the file if there is none. Throws Error if it cannot be written, does not begin with `start` (unless it is
    // empty), or another process has it open.
    LineFile(const std::filesystem::path& file, std::string_view start);
    ~LineFile();
    LineFile(const LineFile&) = delete;
    LineFile& operator=(const LineFile&) = delete;

    // The whole lines that were there when it was opened.
    const std::vector<std::string>& lines() const { return lines_; }

    // Throws Error if the line cannot be written.
    void append(std::string_view line);

  private:
    std::filesystem::path file_;
    int descriptor_ = -1;
    bool created_ = false;
    size_t whole_ = 0;       // bytes of whole lines when it was opened
    bool unfinished_ = false;  // more than those
    std::vector<std::string> lines_;
};

}  // namespace crumb
