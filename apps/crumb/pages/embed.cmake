# Puts the pages into the program: cmake -DFOLDER=.. -DOUTPUT=.. -P embed.cmake. Each becomes one string, with style.css
# and cache.js where it names them in a comment.
file(READ "${FOLDER}/style.css" style)
file(READ "${FOLDER}/cache.js" script)
set(source "#include \"pages.h\"\n\nnamespace crumb::app {\n")
foreach(name chat kv)
    file(READ "${FOLDER}/${name}.html" page)
    string(REPLACE "/*style.css*/" "${style}" page "${page}")
    string(REPLACE "/*cache.js*/" "${script}" page "${page}")
    string(APPEND source "\nconst char* const ${name}_page = R\"~~~(${page})~~~\";\n")
endforeach()
file(WRITE "${OUTPUT}" "${source}\n}  // namespace crumb::app\n")
