#include "calibrate/whole_file.h"

#include <crumb/error.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

namespace crumb {

namespace fs = std::filesystem;

WholeFile::WholeFile(fs::path file) : file_(std::move(file)) {
    if (fs::is_directory(file_)) {
        fail("{} is a folder: give the name of a file to write", file_.string());
    }
    temporary_ = fmt::format("{}.{}.tmp", file_.string(), getpid());
    const int descriptor = open(temporary_.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0666);
    if (descriptor < 0) {
        const int error = errno;
        fail("cannot write {}: {}; choose a folder that exists and can be written to", file_.string(),
             std::strerror(error));
    }
    stream_ = fdopen(descriptor, "wb");
    CRUMB_ASSERT(stream_);
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
