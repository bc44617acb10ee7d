// Pickles as data. Python's unpickler is a machine that calls any function by name; this one knows the opcodes that
// torch.save() writes for dictionaries of tensors, and three constructors: a tensor, its storage and an empty ordered
// dictionary. Everything else is an error. Memory is linear in the input: values are made once and referred to.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace crumb::pickle {

struct Value;
using Ref = const Value*;

struct None {};
struct Mark {};
struct Global {
    std::string name;  // "module name"
};
struct List {
    std::vector<Ref> items;
};
struct Tuple {
    std::vector<Ref> items;
};
struct Dict {
    std::vector<std::pair<Ref, Ref>> items;
};
struct Storage {
    std::string type;  // "FloatStorage"
    std::string key;   // of the archive entry data/KEY
    int64_t elements;
};
struct Tensor {
    Storage storage;
    int64_t offset;  // in elements, as strides
    std::vector<int64_t> shape, stride;
};

struct Value {
    std::variant<None, Mark, bool, int64_t, double, std::string, Global, List, Tuple, Dict, Storage, Tensor> data;
};

// The value that the pickle describes. Throws Error whose text begins with `name`.
class Document {
  public:
    Document(std::span<const std::byte> bytes, const std::string& name);
    Ref root() const { return root_; }

  private:
    friend class Machine;
    std::deque<Value> values_;  // owns all; references stay valid
    Ref root_ = nullptr;
};

// "a number", "a tensor": what a value is, for error texts.
const char* kind(Ref value);

}  // namespace crumb::pickle
