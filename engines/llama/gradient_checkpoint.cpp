#include "gradient_checkpoint.h"

#include <crumb/error.h>

#include <charconv>
#include <cmath>
#include <cstring>
#include <span>

#include "calibrate/fingerprint.h"
#include "calibrate/whole_file.h"

namespace crumb::llama {

namespace {

constexpr const char* kMagic = "crumb gradient 1";
constexpr size_t kLargest = size_t(64) << 30, kDigits = 32;

std::string fingerprint(std::span<const std::byte> bytes) {
    Fingerprint f;
    f.add(bytes);
    return f.hex();
}

// Lines, numbers and doubles from the front of the bytes.
class Reader {
  public:
    Reader(const std::filesystem::path& file, std::span<const std::byte> bytes) : file_(file), left_(bytes) {}

    [[noreturn]] void damaged() const {
        fail("{} is damaged, or no checkpoint of a gradient: delete it to begin anew", file_.string());
    }
    void take(void* to, size_t n) {
        if (left_.size() < n) {
            damaged();
        }
        std::memcpy(to, left_.data(), n);
        left_ = left_.subspan(n);
    }
    std::string line() {
        std::string text;
        for (char c; take(&c, 1), c != '\n';) {
            text += c;
        }
        return text;
    }
    // The numbers of a line "name n n ...".
    std::vector<int64_t> numbers(const std::string& name, size_t count) {
        const std::string text = line() + " ";
        if (!text.starts_with(name + " ")) {
            damaged();
        }
        std::vector<int64_t> all;
        for (const char* at = text.data() + name.size() + 1; at < text.data() + text.size();) {
            int64_t value = 0;
            const auto [end, error] = std::from_chars(at, text.data() + text.size(), value);
            if (error != std::errc{} || *end != ' ' || value < 0) {
                damaged();
            }
            all.push_back(value);
            at = end + 1;
        }
        if (all.size() != count) {
            damaged();
        }
        return all;
    }
    std::vector<double> doubles(size_t n) {
        if (n > left_.size() / sizeof(double)) {
            damaged();
        }
        std::vector<double> values(n);
        take(values.data(), n * sizeof(double));
        return values;
    }
    bool done() const { return left_.empty(); }

  private:
    const std::filesystem::path& file_;
    std::span<const std::byte> left_;
};

}  // namespace

void write_checkpoint(const std::filesystem::path& file, const Identity& identity,
                      const std::vector<WindowSums>& windows) {
    std::string bytes = std::string(kMagic) + "\n";
    for (const auto& [name, value] : identity) {
        bytes += name + " " + value + "\n";
    }
    const auto append = [&](const void* data, size_t n) { bytes.append(static_cast<const char*>(data), n); };
    bytes += fmt::format("windows {}\n", windows.size());
    if (!windows.empty()) {
        bytes += fmt::format("layers {}\n", windows[0].size());
        for (const auto& [number, layer] : windows[0]) {
            const auto dim = [](const std::vector<double>& m) { return std::lround(std::sqrt(double(m.size()))); };
            bytes += fmt::format("layer {} {} {} {}\n", number, layer.heads.size(), dim(layer.heads[0].k),
                                 dim(layer.heads[0].v));
        }
    }
    for (const WindowSums& window : windows) {
        append(&window.begin()->second.tokens, sizeof(uint64_t));
        for (const auto& [number, layer] : window) {
            for (const HeadMetric& head : layer.heads) {
                append(head.k.data(), head.k.size() * sizeof(double));
                append(head.v.data(), head.v.size() * sizeof(double));
            }
        }
    }
    bytes += fingerprint(std::as_bytes(std::span(bytes)));
    write_whole_file(file, std::as_bytes(std::span(bytes)));
}

std::vector<WindowSums> read_checkpoint(const std::filesystem::path& file, const Identity& identity) {
    if (!std::filesystem::exists(file)) {
        return {};
    }
    const std::vector<std::byte> bytes = read_whole_file(file, "checkpoint", kLargest);
    Reader whole(file, bytes);
    if (bytes.size() < kDigits) {
        whole.damaged();
    }
    const auto body = std::span(bytes).first(bytes.size() - kDigits);
    std::string digits(kDigits, '\0');
    std::memcpy(digits.data(), bytes.data() + body.size(), kDigits);
    Reader reader(file, body);
    if (digits != fingerprint(body) || reader.line() != kMagic) {
        whole.damaged();
    }
    for (const auto& [name, value] : identity) {
        const std::string line = reader.line();
        if (!line.starts_with(name + " ")) {
            reader.damaged();
        }
        if (const std::string found = line.substr(name.size() + 1); found != value) {
            fail("{} holds the gradient of another run: its {} is {}, and this run's is {}. Give --checkpoint another "
                 "file, or delete this one",
                 file.string(), name, found, value);
        }
    }
    const int64_t n_windows = reader.numbers("windows", 1)[0];
    std::vector<WindowSums> windows;
    std::vector<std::vector<int64_t>> layers;
    if (n_windows > 0) {
        layers.resize(reader.numbers("layers", 1)[0]);
        for (auto& layer : layers) {
            layer = reader.numbers("layer", 4);
        }
    }
    for (int64_t w = 0; w < n_windows; ++w) {
        WindowSums& window = windows.emplace_back();
        uint64_t tokens = 0;
        reader.take(&tokens, sizeof(tokens));
        for (const auto& layer : layers) {
            LayerMetric& metric = window[int(layer[0])];
            metric.tokens = tokens;
            for (int64_t h = 0; h < layer[1]; ++h) {
                HeadMetric& head = metric.heads.emplace_back();
                head.k = reader.doubles(size_t(layer[2] * layer[2]));
                head.v = reader.doubles(size_t(layer[3] * layer[3]));
            }
        }
    }
    if (!reader.done()) {
        reader.damaged();
    }
    return windows;
}

}  // namespace crumb::llama
