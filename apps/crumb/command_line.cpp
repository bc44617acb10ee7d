#include "command_line.h"

#include <algorithm>
#include <cstdio>

namespace crumb::app {

std::optional<int> parse(CLI::App& app, std::vector<std::string> arguments) {
    for (auto& argument : arguments) {
        if (argument == "-ub") { argument = "--ubatch-size"; }
        if (argument == "-np") { argument = "--parallel"; }
        if (argument == "-kvu") { argument = "--kv-unified"; }
    }
    arguments.erase(arguments.begin());
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes a vector
    try {
        app.parse(std::move(arguments));
        return std::nullopt;
    } catch (const CLI::ExtrasError&) {  // CLI11 names them backwards
        std::string extras;
        for (const auto& extra : app.remaining(true)) { extras += " " + extra; }
        std::fprintf(stderr, "%s: error: unknown or too many:%s; %s --help lists what there is\n", app.get_name().c_str(), extras.c_str(),
                     app.get_name().c_str());
        return kUsageError;
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? 0 : kUsageError;
    }
}

}  // namespace crumb::app
