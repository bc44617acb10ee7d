#include "base/whole_file.h"

#include <crumb/error.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>

namespace crumb {

namespace fs = std::filesystem;

namespace {

constexpr int kMostLinks = 40;  // as Linux follows

// Temporary files of this one whose processes were killed while they wrote. What is younger than a minute stays: a process
// of another machine or container that shares the folder is not to be seen from here.
void remove_stale(const fs::path& file) {
    const std::string begin = file.filename().string() + ".", end = ".tmp";
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(file.has_parent_path() ? file.parent_path() : ".", error)) {
        const std::string name = entry.path().filename().string();
        if (name.size() <= begin.size() + end.size() || !name.starts_with(begin) || !name.ends_with(end)) {
            continue;
        }
        pid_t process = 0;
        const char *first = name.data() + begin.size(), *last = name.data() + name.size() - end.size();
        const auto [stop, invalid] = std::from_chars(first, last, process);
        if (invalid != std::errc{} || stop != last || process < 1 || kill(process, 0) == 0 || errno != ESRCH) {
            continue;
        }
        const auto written = fs::last_write_time(entry.path(), error);
        if (!error && fs::file_time_type::clock::now() - written > std::chrono::minutes(1)) {
            fs::remove(entry.path(), error);
        }
    }
}

}  // namespace

fs::path output_file(const fs::path& name) {
    struct stat at, printed;
    if (stat(name.c_str(), &at) == 0) {
        if (S_ISDIR(at.st_mode)) {
            fail("{} is a folder: give the name of a file to write", name.string());
        }
        if (!S_ISREG(at.st_mode)) {
            fail("{} is a device or a pipe, and an output is written under another name and renamed: give the name of "
                 "a file",
                 name.string());
        }
        for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
            if (fstat(descriptor, &printed) == 0 && printed.st_dev == at.st_dev && printed.st_ino == at.st_ino) {
                fail("{} is where messages of this command go: give the name of another file", name.string());
            }
        }
    }
    if (name == "-") {
        fail("- is no file: outputs are not written to standard output, give the name of a file");
    }
    fs::path file = name;
    std::error_code error;
    for (int links = 0; fs::is_symlink(file, error); ++links) {
        if (links == kMostLinks) {
            fail("{} is a symbolic link that leads to itself: give the name of a file to write", name.string());
        }
        file = file.parent_path() / fs::read_symlink(file);
    }
    return file;
}

void require_different(std::initializer_list<NamedOutput> outputs) {
    std::map<fs::path, std::string_view> seen;
    for (const auto& [name, file] : outputs) {
        if (file.empty()) {
            continue;
        }
        const auto [other, first] = seen.emplace(fs::weakly_canonical(fs::absolute(output_file(file))), name);
        if (!first) {
            fail("{} and {} are the same file {}: give each its own", other->second, name, file.string());
        }
    }
}

WholeFile::WholeFile(fs::path file) : file_(output_file(file)) {
    remove_stale(file_);
    temporary_ = fmt::format("{}.{}.tmp", file_.string(), getpid());
    const int descriptor = open(temporary_.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0666);
    if (descriptor < 0) {
        const int error = errno;
        fail("cannot write {}: {}; choose a folder that exists and can be written to", file_.string(),
             std::strerror(error));
    }
    stream_ = fdopen(descriptor, "wb");
    CRUMB_ASSERT(stream_);
    if (struct stat before; stat(file_.c_str(), &before) == 0) {
        fchmod(descriptor, before.st_mode & 07777);
    }
}

WholeFile::~WholeFile() {
    if (stream_) {
        std::fclose(stream_);
        unlink(temporary_.c_str());
    }
}

void WholeFile::write(std::span<const std::byte> bytes) {
    if (std::fwrite(bytes.data(), 1, bytes.size(), stream_) != bytes.size()) {
        const int error = errno;
        fail("cannot write {}: {} after part of the data; nothing was replaced", file_.string(), std::strerror(error));
    }
}

void WholeFile::commit() {
    if (std::fflush(stream_) != 0 || fsync(fileno(stream_)) != 0 ||
        std::rename(temporary_.c_str(), file_.c_str()) != 0) {
        const int error = errno;
        fail("cannot write {}: {}; nothing was replaced", file_.string(), std::strerror(error));
    }
    std::fclose(stream_);
    stream_ = nullptr;
}

void write_whole_file(const fs::path& file, std::span<const std::byte> bytes) {
    WholeFile out(file);
    out.write(bytes);
    out.commit();
}

void require_replaceable(const fs::path& file, size_t offset, std::string_view magic, const char* what) {
    std::error_code error;
    if (fs::exists(file, error) && fs::is_regular_file(file, error) && fs::file_size(file, error) > 0) {
        std::string start(offset + magic.size(), '\0');
        const std::unique_ptr<std::FILE, int (*)(std::FILE*)> in(std::fopen(file.c_str(), "rb"), std::fclose);
        const size_t n = in ? std::fread(start.data(), 1, start.size(), in.get()) : 0;
        if (n != start.size() || std::string_view(start).substr(offset) != magic) {
            fail("{} exists and is not {}: choose another name, or remove it first", file.string(), what);
        }
    }
    WholeFile{file};  // can it be written?
}

std::vector<std::byte> read_whole_file(const fs::path& file, const char* what, size_t limit) {
    std::error_code error;
    if (!fs::exists(file, error)) {
        fail("{}: there is no such file", file.string());
    }
    if (!fs::is_regular_file(file, error)) {
        fail("{}: not a file, but {} is one", file.string(), what);
    }
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> in(std::fopen(file.c_str(), "rb"), std::fclose);
    if (!in) {
        const int number = errno;
        fail("cannot read {}: {}", file.string(), std::strerror(number));
    }
    const size_t size = fs::file_size(file);
    if (size > limit) {
        fail("{}: {} bytes are too many for {}, which has at most {}", file.string(), size, what, limit);
    }
    std::vector<std::byte> bytes(size);
    const size_t n = std::fread(bytes.data(), 1, size, in.get());
    if (n != size) {
        fail("cannot read {}: it ended after {} of {} bytes", file.string(), n, size);
    }
    return bytes;
}

}  // namespace crumb
