#include "calibrate/torch_archive.h"

#include <crumb/error.h>
#include <crumb/half.h>
#include <zip.h>

#include <bit>
#include <cstring>
#include <optional>

namespace crumb {

static_assert(std::endian::native == std::endian::little, "storages are copied as they are");

namespace {

struct CloseEntry {
    void operator()(zip_file_t* entry) const { zip_fclose(entry); }
};

constexpr size_t element_bytes(std::string_view storage) {
    return storage == "DoubleStorage" ? 8 : storage == "FloatStorage" ? 4 : 2;
}

template <class T>
T value_at(std::span<const std::byte> data, size_t i) {
    T value;
    std::memcpy(&value, data.data() + i * sizeof(T), sizeof(T));
    return value;
}

float element(std::string_view storage, std::span<const std::byte> data, size_t i) {
    if (storage == "FloatStorage") {
        return value_at<float>(data, i);
    }
    if (storage == "DoubleStorage") {
        return float(value_at<double>(data, i));
    }
    if (storage == "HalfStorage") {
        return to_float(value_at<fp16>(data, i));
    }
    CRUMB_ASSERT(storage == "BFloat16Storage");
    return to_float(value_at<bf16>(data, i));
}

}  // namespace

class TorchArchive::Zip {
  public:
    Zip(std::span<const std::byte> bytes, const std::string& name) : name_(name), bytes_(bytes.size()) {
        zip_error_t error;
        zip_error_init(&error);
        zip_source_t* source = zip_source_buffer_create(bytes.data(), bytes.size(), 0, &error);
        CRUMB_ASSERT(source);
        archive_ = zip_open_from_source(source, ZIP_RDONLY, &error);
        const std::string text = zip_error_strerror(&error);
        zip_error_fini(&error);
        if (!archive_) {
            zip_source_free(source);
            fail(
                "{}: not a PyTorch file: {}. Files of PyTorch before 1.6 are of another kind: load and save them again "
                "with "
                "torch.load and torch.save",
                name_, text);
        }
        find_folder();
    }
    ~Zip() { zip_discard(archive_); }

    std::optional<std::vector<std::byte>> find(const std::string& entry) const {
        const std::string path = folder_ + entry;
        zip_stat_t stat;
        zip_stat_init(&stat);
        if (zip_stat(archive_, path.c_str(), 0, &stat) != 0) {
            return std::nullopt;
        }
        constexpr uint64_t needed =
            ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD | ZIP_STAT_ENCRYPTION_METHOD;
        if ((stat.valid & needed) != needed || stat.comp_method != ZIP_CM_STORE || stat.comp_size != stat.size ||
            stat.encryption_method != ZIP_EM_NONE || stat.size > bytes_) {
            fail("{}: entry {} is not stored as it is; PyTorch stores its entries uncompressed", name_, path);
        }
        const std::unique_ptr<zip_file_t, CloseEntry> file(zip_fopen_index(archive_, stat.index, 0));
        std::vector<std::byte> data(stat.size);
        std::byte more;
        // the read behind the end checks the entry's checksum
        if (!file || zip_fread(file.get(), data.data(), data.size()) != zip_int64_t(data.size()) ||
            zip_fread(file.get(), &more, 1) != 0) {
            fail("{}: entry {} is damaged: {}", name_, path,
                 file ? zip_file_strerror(file.get()) : zip_strerror(archive_));
        }
        return data;
    }

    std::vector<std::byte> get(const std::string& entry) const {
        if (auto data = find(entry)) {
            return std::move(*data);
        }
        fail("{}: entry {} is missing", name_, folder_ + entry);
    }

  private:
    void find_folder() {
        constexpr std::string_view pickle = "/data.pkl";
        for (zip_int64_t i = 0; i < zip_get_num_entries(archive_, 0); ++i) {
            const char* path = zip_get_name(archive_, i, 0);
            const std::string_view view = path ? path : "";
            if (view.ends_with(pickle) && view.find('/') == view.size() - pickle.size()) {
                folder_ = view.substr(0, view.size() - pickle.size() + 1);
                return;
            }
        }
        zip_discard(archive_);
        fail("{}: not a PyTorch file: the zip archive has no NAME/data.pkl", name_);
    }

    const std::string& name_;
    const size_t bytes_;
    zip_t* archive_ = nullptr;
    std::string folder_;
};

TorchArchive::TorchArchive(std::span<const std::byte> bytes, std::string name)
    : name_(std::move(name)), zip_(std::make_unique<Zip>(bytes, name_)) {
    if (const auto order = zip_->find("byteorder")) {
        const std::string text(reinterpret_cast<const char*>(order->data()), order->size());
        if (text != "little") {
            fail("{}: its byte order is '{}', only little can be read", name_, text);
        }
    }
    document_ = std::make_unique<pickle::Document>(zip_->get("data.pkl"), name_);
}

TorchArchive::~TorchArchive() = default;

std::vector<float> TorchArchive::elements(const pickle::Tensor& tensor) const {
    const auto& storage = tensor.storage;
    const std::vector<std::byte> data = zip_->get("data/" + storage.key);
    const auto available = int64_t(data.size() / element_bytes(storage.type));
    // The last element within the storage, and no more elements than it has (so that strides of 0 make nothing large).
    int64_t count = 1, last = tensor.offset;
    bool fits = storage.elements <= available && last < storage.elements;
    for (size_t i = 0; i < tensor.shape.size() && fits; ++i) {
        int64_t reach = 0;
        fits = tensor.shape[i] > 0 && !__builtin_mul_overflow(count, tensor.shape[i], &count) &&
               !__builtin_mul_overflow(tensor.shape[i] - 1, tensor.stride[i], &reach) &&
               !__builtin_add_overflow(last, reach, &last) && last < storage.elements && count <= storage.elements;
    }
    if (!fits) {
        fail(
            "{}: a tensor of shape [{}] at offset {} does not fit its storage {} of {} elements ({} bytes in the file)",
            name_, fmt::join(tensor.shape, ", "), tensor.offset, storage.key, storage.elements, data.size());
    }
    std::vector<float> result(static_cast<size_t>(count));
    std::vector<int64_t> index(tensor.shape.size());
    int64_t at = tensor.offset;
    for (float& x : result) {
        x = element(storage.type, data, size_t(at));
        for (size_t i = index.size(); i-- > 0;) {
            at += tensor.stride[i];
            if (++index[i] < tensor.shape[i]) {
                break;
            }
            at -= tensor.stride[i] * tensor.shape[i];
            index[i] = 0;
        }
    }
    return result;
}

void TorchWriter::put(std::string_view bytes) { pickle_ += bytes; }

template <class T>
void TorchWriter::put_value(T value) {
    pickle_.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

TorchWriter::TorchWriter() { put("\x80\x02"); }

void TorchWriter::begin_dictionary() { put("}("); }
void TorchWriter::end_dictionary() { put("u"); }

void TorchWriter::text(std::string_view value) {
    put("X");
    put_value(uint32_t(value.size()));
    put(value);
}

void TorchWriter::number(int32_t value) {
    put("J");
    put_value(value);
}

void TorchWriter::tensor(std::span<const float> elements, const std::vector<int>& shape) {
    put("ctorch._utils\n_rebuild_tensor_v2\n((");
    text("storage");
    put("ctorch\nFloatStorage\n");
    text(std::to_string(storages_.size()));
    text("cpu");
    number(int32_t(elements.size()));
    put("tQ");
    number(0);
    put("(");
    for (const int n : shape) {
        number(n);
    }
    put("t(");
    int stride = int(elements.size());
    for (const int n : shape) {
        number(stride /= n);
    }
    put("t\x89"
        "ccollections\nOrderedDict\n)RtR");
    storages_.push_back(elements);
}

std::vector<std::byte> TorchWriter::finish() {
    put(".");
    zip_error_t error;
    zip_error_init(&error);
    zip_source_t* target = zip_source_buffer_create(nullptr, 0, 0, &error);
    CRUMB_ASSERT(target);
    zip_source_keep(target);
    zip_t* archive = zip_open_from_source(target, ZIP_TRUNCATE, &error);
    CRUMB_ASSERT(archive);
    const auto add = [&](const std::string& entry, const void* data, size_t size) {
        zip_source_t* source = zip_source_buffer(archive, data, size, 0);
        const zip_int64_t index = zip_file_add(archive, ("archive/" + entry).c_str(), source, ZIP_FL_ENC_UTF_8);
        CRUMB_ASSERT(index >= 0);
        CRUMB_ASSERT(zip_set_file_compression(archive, zip_uint64_t(index), ZIP_CM_STORE, 0) == 0);
        CRUMB_ASSERT(zip_file_set_dostime(archive, zip_uint64_t(index), 0, 0x21, 0) == 0);  // 1980-01-01
    };
    add("data.pkl", pickle_.data(), pickle_.size());
    add("byteorder", "little", 6);
    for (size_t i = 0; i < storages_.size(); ++i) {
        add(fmt::format("data/{}", i), storages_[i].data(), storages_[i].size_bytes());
    }
    add("version", "3\n", 2);
    CRUMB_ASSERT(zip_close(archive) == 0);

    zip_stat_t stat;
    CRUMB_ASSERT(zip_source_stat(target, &stat) == 0 && zip_source_open(target) == 0);
    std::vector<std::byte> bytes(stat.size);
    CRUMB_ASSERT(zip_source_read(target, bytes.data(), bytes.size()) == zip_int64_t(bytes.size()));
    zip_source_close(target);
    zip_source_free(target);
    return bytes;
}

}  // namespace crumb
