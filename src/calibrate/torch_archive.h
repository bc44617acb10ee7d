// PyTorch's file format since 1.6: a zip archive of stored entries, NAME/data.pkl for the structure (pickle.h) and
// NAME/data/KEY for the elements of storage KEY. Tensors may share a storage and look at parts of it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "calibrate/pickle.h"

namespace crumb {

class TorchArchive {
  public:
    // `bytes` must outlive the archive. Errors begin with `name`.
    TorchArchive(std::span<const std::byte> bytes, std::string name);
    ~TorchArchive();

    pickle::Ref root() const { return document_->root(); }

    // The elements of a tensor, row major, as F32.
    std::vector<float> elements(const pickle::Tensor& tensor) const;

  private:
    class Zip;
    std::string name_;
    std::unique_ptr<Zip> zip_;
    std::unique_ptr<pickle::Document> document_;
};

// Builds a file that torch.load(..., weights_only=True) reads: values in the order in which they are to be read, a
// dictionary as begin_dictionary(), key, value, key, value, ..., end_dictionary().
class TorchWriter {
  public:
    TorchWriter();

    void begin_dictionary();
    void end_dictionary();
    void text(std::string_view value);
    void number(int32_t value);
    void tensor(std::span<const float> elements, const std::vector<int>& shape);

    // The same bytes for the same values: entries carry no time.
    std::vector<std::byte> finish();

  private:
    void put(std::string_view bytes);
    template <class T>
    void put_value(T value);

    std::string pickle_;
    std::vector<std::span<const float>> storages_;
};

}  // namespace crumb
