// Renders conversations with Hugging Face's own JavaScript implementation of chat templates.
// Run as: node render.cjs JINJA_INDEX_CJS < {"template": ..., "conversations": [{...variables}, ...]}; prints the texts as a JSON list.
const { Template } = require(process.argv[2]);
const { template, conversations } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const compiled = new Template(template);
process.stdout.write(JSON.stringify(conversations.map((variables) => compiled.render(variables))));
