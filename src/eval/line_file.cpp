#include "eval/line_file.h"

#include "base/whole_file.h"

#include <crumb/error.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace crumb {

namespace {

[[noreturn]] void fail_with(const std::filesystem::path& file, const char* what) {
    fail("cannot {} {}: {}", what, file.string(), std::strerror(errno));
}

// Stops early if the text does not begin as it must.
std::string read_all(int descriptor, const std::filesystem::path& file, std::string_view start) {
    std::string text;
    std::array<char, 1 << 16> buffer;
    for (;;) {
        const ssize_t n = read(descriptor, buffer.data(), buffer.size());
        if (n == 0) { return text; }
        if (n < 0 && errno != EINTR) { fail_with(file, "read"); }
        if (n > 0) { text.append(buffer.data(), size_t(n)); }
        if (text.substr(0, start.size()) != start.substr(0, text.size())) {
            fail("{} exists and holds something else: choose another name", file.string());
        }
    }
}

}  // namespace

LineFile::LineFile(const std::filesystem::path& file, std::string_view start) : file_(output_file(file)) {
    constexpr int kFlags = O_RDWR | O_APPEND | O_CLOEXEC;
    descriptor_ = open(file_.c_str(), kFlags | O_CREAT | O_EXCL, 0666);
    created_ = descriptor_ >= 0;
    if (!created_ && errno == EEXIST) { descriptor_ = open(file_.c_str(), kFlags); }
    if (descriptor_ < 0) { fail_with(file_, "open"); }
    try {
        if (flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
            fail("{} is being written by another crumb eval: wait for it, or give this run its own file with --results FILE", file_.string());
        }
        const std::string text = read_all(descriptor_, file_, start);
        for (size_t end; (end = text.find('\n', whole_)) != std::string::npos; whole_ = end + 1) { lines_.push_back(text.substr(whole_, end - whole_)); }
        unfinished_ = whole_ < text.size();
    } catch (...) {
        close(descriptor_);
        throw;
    }
}

LineFile::~LineFile() {
    struct stat status;
    if (created_ && fstat(descriptor_, &status) == 0 && status.st_size == 0) { unlink(file_.c_str()); }  // while it is locked
    close(descriptor_);
}

void LineFile::append(std::string_view line) {
    CRUMB_ASSERT(line.find('\n') == std::string_view::npos);
    if (unfinished_ && ftruncate(descriptor_, off_t(whole_)) != 0) { fail_with(file_, "repair"); }
    unfinished_ = false;
    const std::string whole = std::string(line) + '\n';
    size_t done = 0;
    while (done < whole.size()) {
        const ssize_t n = write(descriptor_, whole.data() + done, whole.size() - done);
        if (n < 0 && errno != EINTR) { fail_with(file_, "write"); }
        done += size_t(std::max<ssize_t>(n, 0));
    }
    if (fdatasync(descriptor_) != 0 && errno != EINVAL) { fail_with(file_, "flush"); }
}

}  // namespace crumb
