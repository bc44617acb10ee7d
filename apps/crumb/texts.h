// Texts that commands read: files of the user, or what tools/fetch.py text put into the cache folder.
#pragma once

#include "session.h"

#include <filesystem>
#include <string>
#include <vector>

namespace crumb::app {

// `half` is "calibration" or "evaluation": documentation, prose, code and other languages. Throws Error that says what to type if they have
// not been fetched.
std::vector<std::filesystem::path> fetched_texts(const char* half);

// Throws Error if a file was named twice: what is in it would count twice.
void require_different_texts(const std::vector<std::filesystem::path>& files);

// What texts are called in tables: each file's name without its extension, and if two have the same, or one has that of
// their sum, "all", so much of the path of each as tells them apart. Of different files.
std::vector<std::string> text_names(const std::vector<std::filesystem::path>& files);

// The first n tokens of a text, without special tokens. Throws Error if it has fewer.
std::vector<llama_token> first_tokens(const llama_model* model, const std::filesystem::path& file, size_t n);

}  // namespace crumb::app
