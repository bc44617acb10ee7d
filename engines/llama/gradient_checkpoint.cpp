#include "gradient_checkpoint.h"

#include <crumb/error.h>

#include <charconv>
#include <cmath>
#include <cstring>
#include <span>

#include "calibrate/fingerprint.h"
#include "base/whole_file.h"

namespace crumb::llama {

namespace {

constexpr const char *kMagic = "crumb gradient ", *kVersion = "2";
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

void require_checkpoint_output(const std::filesystem::path& file) {
    require_replaceable(file, 0, kMagic, "a checkpoint of a gradient");
}

void write_checkpoint(const std::filesystem::path& file, const Identity& identity, const GradientSums& sums) {
    std::string bytes = fmt::format("{}{}\n", kMagic, kVersion);
    for (const auto& [name, value] : identity) {
        bytes += name + " " + value + "\n";
    }
    bytes += fmt::format("windows {}\n", sums.windows);
    for (const Metric& part : sums.parts) {
        bytes += fmt::format("layers {}\n", part.size());
        for (const auto& [number, layer] : part) {
            const auto dim = [](const std::vector<double>& m) { return std::lround(std::sqrt(double(m.size()))); };
            bytes += fmt::format("layer {} {} {} {} {}\n", number, layer.heads.size(), dim(layer.heads[0].k),
                                 dim(layer.heads[0].v), layer.tokens);
        }
    }
    for (const Metric& part : sums.parts) {
        for (const auto& [number, layer] : part) {
            for (const HeadMetric& head : layer.heads) {
                for (const auto* side : {&head.k, &head.v}) {
                    bytes.append(reinterpret_cast<const char*>(side->data()), side->size() * sizeof(double));
                }
            }
        }
    }
    bytes += fingerprint(std::as_bytes(std::span(bytes)));
    write_whole_file(file, std::as_bytes(std::span(bytes)));
}

GradientSums read_checkpoint(const std::filesystem::path& file, const Identity& identity) {
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
    const std::string first = digits == fingerprint(body) ? reader.line() : "";
    if (!first.starts_with(kMagic)) {
        whole.damaged();
    }
    if (const std::string version = first.substr(std::strlen(kMagic)); version != kVersion) {
        fail("{} is a checkpoint of format {}, and this program goes on from format {}: delete it to begin anew", file.string(),
             version, kVersion);
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
    GradientSums sums;
    sums.windows = size_t(reader.numbers("windows", 1)[0]);
    std::array<std::vector<std::vector<int64_t>>, kFolds> layers;
    for (auto& of_part : layers) {
        of_part.resize(reader.numbers("layers", 1)[0]);
        for (auto& layer : of_part) {
            layer = reader.numbers("layer", 5);
        }
    }
    for (size_t part = 0; part < layers.size(); ++part) {
        for (const auto& layer : layers[part]) {
            LayerMetric& metric = sums.parts[part][int(layer[0])];
            metric.tokens = uint64_t(layer[4]);
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
    return sums;
}

}  // namespace crumb::llama
